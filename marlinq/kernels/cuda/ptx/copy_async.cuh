// cp.async: copies of 16 bytes by the threads themselves.
#pragma once
#include "ptx/types.cuh"

// 16 bytes from global to shared memory; bytes from `valid` on are filled with zeros.
__device__ __forceinline__ void copy_async_16(u32 destination, const void* source, u32 valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
