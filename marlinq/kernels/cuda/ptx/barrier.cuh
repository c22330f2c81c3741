// Barriers of a block: the numbered ones (bar.sync), and mbarriers of compute capability 9.0 and later.
#pragma once
#include "fault_site.cuh"
#include "ptx/types.cuh"

// Barrier `index` of the block, among `threads` threads.
__device__ __forceinline__ void barrier_sync(int index, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once, and adds `bytes` to the bytes that must be copied before the phase ends.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with that parity has ended; other blocks' counted stores of that phase are then visible.
__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        FAULT_SITE(barrier_asked_again, "@!done bra again;\n")
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}
