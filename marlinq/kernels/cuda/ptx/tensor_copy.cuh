// Tensor copies (TMA), of compute capability 9.0 and later (PTX ISA, chapter cp.async.bulk).
#pragma once
#include "ptx/types.cuh"

// A CUtensorMap, opaque.
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

// Whether this lane is the one of its warp, all of whose lanes ask, that acts for all. In a branch on nothing but this and what the
// warp agrees on, the compiler knows that a single lane is active. Elsewhere it puts a loop over lanes around each tensor
// copy, whose operands are in uniform registers, and 80 cycles a copy with it.
__device__ __forceinline__ bool elected() {
    u32 chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
    return chosen;
}

// The map's box at element `x` of row `y` of plane `z`, for data that is read once: it leaves L2 first.
// Elements outside the tensor arrive as zeros and count as bytes.
__device__ __forceinline__ void copy_box_once(u32 destination, const TensorMap* map, int x, int y, int z, u32 barrier) {
    const u64 evict_first = 0x12f0000000000000ull;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], "
        "[%5], %6;" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(evict_first)
        : "memory");
}

// As above, of a map of two dimensions and for data that others read too.
__device__ __forceinline__ void copy_box(u32 destination, const TensorMap* map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
