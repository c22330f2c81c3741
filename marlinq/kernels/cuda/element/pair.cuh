// Pairs of 16-bit floats in one 32-bit register, for any element type.
#pragma once
#include "fault_site.cuh"
#include "ptx/types.cuh"

// Half h (0 or 1) of a pair, repeated in both halves.
template <int H>
__device__ __forceinline__ u32 broadcast(u32 pair) {
    u32 r;
    // Written as halves, which the next instruction can often read in place; prmt would always be an instruction of its own.
    if constexpr (H == 0) {
        asm("{ .reg .b16 l; .reg .b16 h; mov.b32 {l, h}, %1; " FAULT_SITE(low_pair, "mov.b32 %0, {l, l};") " }" : "=r"(r) : "r"(pair));
    } else {
        asm("{ .reg .b16 l; .reg .b16 h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(r) : "r"(pair));
    }
    return r;
}

// Half h of a pair of elements E as a float.
template <typename E, int H>
__device__ __forceinline__ float widen_half(u32 pair) {
    return E::widen(H == 0 ? pair & 0xffffu : pair >> 16);
}
