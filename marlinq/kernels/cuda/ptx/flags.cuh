// Flags in global memory that order the work of blocks.
#pragma once
#include "fault_site.cuh"
#include "ptx/types.cuh"

// A thread that acquires a released value sees all that its writer wrote or acquired before.
__device__ __forceinline__ void store_release(u32* flag, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(u32* flag, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* flag) {
    u32 value;
    asm volatile(FAULT_SITE(flag_acquired, "ld.acquire.gpu.global.u32 %0, [%1];") : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// Adds to a flag with release and acquire ordering; returns its old value.
__device__ __forceinline__ u32 add_acquire_release(u32* flag, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(flag), "r"(value) : "memory");
    return before;
}
