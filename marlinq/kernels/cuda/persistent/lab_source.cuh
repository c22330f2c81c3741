// Where the lab's variants of the producer read weights, to see what their order in memory costs: results are wrong, the bytes
// as many. Outside of the lab there is nothing here.
#pragma once
#include "persistent/shape.cuh"

constexpr bool LAB_HAS_SCALES = LAB_SOURCE == 0 || LAB_SOURCE == 2 || LAB_SOURCE >= 5;

// Addresses of a stage's words, its scales and its barrier.
struct LabStage {
    u32 words, scales, barrier;
};

#if LAB_SOURCE >= 2
__device__ __forceinline__ void copy_bytes_once(u32 destination, const void* source, u32 bytes, u32 barrier) {
    const u64 evict_first = 0x12f0000000000000ull;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(evict_first)
        : "memory");
}

// Stage `stage` of the set of tiles at `at`, unless this variant leaves it where it is.
template <typename S>
__device__ __forceinline__ bool copy_from_elsewhere(const StepLayer* layer, int product, const ProductShape& shape, const Share<S>& share, int at,
                                                    const TileSet<S>& set, int stage, const LabStage& to) {
    const unsigned char* from = layer->words_at[product];
    const int unit = set.unit_of(stage), units = min(1 << set.slices, share.units - unit), boxed = shape.box_units[set.log];
    if (LAB_SOURCE == 5 || LAB_SOURCE == 6) {
        // Pieces of eight or sixteen tiles of a row.
        if (set.log != 2) return false;
        constexpr int RUN = LAB_SOURCE == 5 ? 8 : 16, RUN_ROWS = 32 / RUN, SETS = RUN / 4;
        const i64 last = (i64)shape.tiles * (shape.channels / 16) - RUN;
#pragma unroll 1
        for (int r = 0; r < RUN_ROWS; ++r) {
            const i64 row = (share.first + unit) * S::UNIT_ROWS + at / 4 % SETS * RUN_ROWS + r, tile = share.first_tile + at / RUN * RUN;
            copy_bytes_once(to.words + r * RUN * 512, from + min(row * shape.tiles + tile, last) * 512, RUN * 512, to.barrier);
        }
    } else {
        if (LAB_SOURCE == 7 && product == GATE_UP) return false;
        // As if a block's units were neighbours, or those that all blocks read at a time.
        const i64 all = (i64)shape.tiles * ((shape.channels + S::UNIT - 1) / S::UNIT);
        const i64 own = (i64)share.first_tile * (all / shape.tiles) + (i64)share.tiles * share.first + (i64)at * share.units + (unit << set.log);
        const i64 common = min((i64)((at / 4 * set.stages + stage) * (int)gridDim.x + blockIdx.x) * S::TEAM, all - S::TEAM);
        copy_bytes_once(to.words, from + (LAB_SOURCE == 4 ? common : own) * S::UNIT_BYTES, (units << set.log) * S::UNIT_BYTES, to.barrier);
    }
    for (int u = 0; u < units && LAB_HAS_SCALES; u += boxed)
        copy_box_once(to.scales + (u << set.log) * S::UNIT_SCALE_BYTES, &layer->scales[product][set.log], 0, share.first_tile + at,
                      (share.first + unit + u) * S::UNIT_GROUPS, to.barrier);
    return true;
}
#else
template <typename S>
__device__ __forceinline__ bool copy_from_elsewhere(const StepLayer*, int, const ProductShape&, const Share<S>&, int, const TileSet<S>&, int,
                                                    const LabStage&) {
    return false;
}
#endif
