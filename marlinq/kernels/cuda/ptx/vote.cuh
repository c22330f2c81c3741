// What the lanes of a warp hold in common.
#pragma once
#include "ptx/types.cuh"

// The lanes that hold the same number, as a mask.
__device__ __forceinline__ u32 lanes_with_same(int number) {
    u32 result;
    asm volatile("match.any.sync.b32 %0, %1, %2;" : "=r"(result) : "r"(number), "r"(0xffffffffu));
    return result;
}

__device__ __forceinline__ u32 count_bits(u32 number) {
    u32 result;
    asm("popc.b32 %0, %1;" : "=r"(result) : "r"(number));
    return result;
}
