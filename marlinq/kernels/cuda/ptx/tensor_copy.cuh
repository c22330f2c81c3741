// Tensor copies (TMA), of compute capability 9.0 and later (PTX ISA, chapter cp.async.bulk).
#pragma once
#include "ptx/types.cuh"

// A CUtensorMap, whose bytes only the driver and the hardware understand.
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

// Whether this lane is its warp's elected one (elect.sync); all lanes of the warp must ask. Inside a branch on only this and on
// values that are uniform in the warp, the compiler knows that a single lane is active. In any other branch it puts a loop over
// lanes around each tensor copy, whose operands are in uniform registers, which costs 80 cycles a copy.
__device__ __forceinline__ bool elected() {
    u32 chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
    return chosen;
}

// Copies the map's box at element `x` of row `y` of plane `z`, with the evict-first policy for data that is read once.
// Elements outside the tensor arrive as zeros, and their bytes are counted too.
__device__ __forceinline__ void copy_box_once(u32 destination, const TensorMap* map, int x, int y, int z, u32 barrier) {
    const u64 evict_first = 0x12f0000000000000ull;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], "
        "[%5], %6;" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(evict_first)
        : "memory");
}

// The same for a map of two dimensions and for data that other blocks read too.
__device__ __forceinline__ void copy_box(u32 destination, const TensorMap* map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
