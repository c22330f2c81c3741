// Stream-K's fix-up: blocks that share a tile hand their sums over through global memory (schedule/tile_work.cuh).
//
// Every warp stores its accumulators for the same warp of the higher block: vectors of four floats a lane, those of a warp side by
// side. A block has one flag, 0 before and after every launch.
#pragma once
#include "fault_site.cuh"
#include "mma/warpgroup_sums.cuh"
#include "ptx/barrier.cuh"
#include "ptx/flags.cuh"
#include "ptx/launch.cuh"
#include "schedule/tile_work.cuh"

// Floats that a warp stores.
template <typename Shape>
constexpr int WARP_SUMS = Shape::PRODUCTS * Shape::TILE_M / 8 * 128;

template <int Products, int Elements>
__device__ __forceinline__ void leave_sums(const float (&sums)[Products][Elements], const PerColumn<Products>& units,
                                           float* warps, int lane) {
    constexpr int VECTORS = Products * Elements / 4, IN_PRODUCT = Elements / 4;
    float* mine = warps + lane * 4;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const float *sum = sums[v / IN_PRODUCT] + v % IN_PRODUCT * 4, *unit = units.of[v / IN_PRODUCT];
        store_global(mine + v * 128, make_uint4(__float_as_uint(sum[0] * unit[0]), __float_as_uint(sum[1] * unit[0]),
                                                __float_as_uint(sum[2] * unit[1]), __float_as_uint(sum[3] * unit[1])));
    }
}

// sums = sums * units + sums that another block stored.
template <int Products, int Elements>
__device__ __forceinline__ void add_sums(float (&sums)[Products][Elements], const PerColumn<Products>& units,
                                         const float* warps, int lane) {
    constexpr int VECTORS = Products * Elements / 4, IN_PRODUCT = Elements / 4;
    const float* mine = opaque(warps + lane * 4);
    // Vectors loaded at once, limited by the registers that are free between two tiles.
    constexpr int AT_ONCE = 16;
#pragma unroll
    for (int from = 0; from < VECTORS; from += AT_ONCE) {
        uint4 loaded[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (from + i < VECTORS) loaded[i] = load_l2(mine + (from + i) * 128);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (from + i < VECTORS) {
                float* sum = sums[(from + i) / IN_PRODUCT] + (from + i) % IN_PRODUCT * 4;
                const float* unit = units.of[(from + i) / IN_PRODUCT];
                sum[0] = fmaf(sum[0], unit[0], __uint_as_float(loaded[i].x));
                sum[1] = fmaf(sum[1], unit[0], __uint_as_float(loaded[i].y));
                sum[2] = fmaf(sum[2], unit[1], __uint_as_float(loaded[i].z));
                sum[3] = fmaf(sum[3], unit[1], __uint_as_float(loaded[i].w));
            }
    }
}

// One thread beside the TMA producer sets this block's flag when its warps have left their sums (mbarrier `all_left`), and
// tells them when the lower blocks have left theirs (mbarrier `all_there`). So no warp that multiplies waits for memory to be
// ordered or polls a flag. Each happens at most once in a launch.
//
// Launches of a stream share flags and memory, though the next one may begin early. That is safe: it touches flags after its
// wait for the previous kernel, and memory after products of activations, which were requested after the same wait.
template <typename Shape>
__device__ __forceinline__ void exchange_flags(TileWork<Shape> work, u32* flags, u32 all_left, u32 all_there,
                                               bool dependent) {
    FAULT_SITE(fixup_waits, if (dependent) wait_for_previous_kernel();)
    for (; work.left(); work.next()) {
        if (work.lacks_end()) {
            FAULT_SITE(fixup_sums_left, barrier_wait(all_left, 0);)
            FAULT_SITE(fixup_announces, store_release(flags + blockIdx.x, 1);)
        } else if (work.begin > 0) {
            FAULT_SITE(fixup_blocks, for (int block = blockIdx.x; work.lacks_begin(block);)) {
                u32* flag = FAULT_SITE(fixup_block, flags + --block);
                FAULT_SITE(fixup_waits_for_flag, while (load_acquire(flag) == 0) continue;)
                // No other thread reads it in this launch.
                FAULT_SITE(fixup_clears_flag, store_relaxed(flag, 0);)
            }
            barrier_arrive(all_there);
        }
    }
}
