// Split-K reduction by reading: a block adds the sums of its own parts of K from its shared memory, and those of the cluster's other
// blocks through DSMEM.
//
// With an ACTIVATION, tiles of 64 columns of gate and of up alternate, and activation(gate) * up is stored: half as many columns,
// each from a pair of tiles of one block.
#pragma once
#include "fault_site.cuh"
#include "epilogue/activation.cuh"
#include "epilogue/rows.cuh"
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"

// Four sums of row m, columns n .. n + 3 of a tile, over the parts of all blocks, always in the same order.
template <int TileM, int Pitch, int Parts, int Cluster>
__device__ __forceinline__ float4 add_parts(const float* buffer, int m, int n) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int r = 0; r < Cluster; ++r)
#pragma unroll
        for (int p = 0; p < Parts; ++p) {
            const float* source = buffer + (p * TileM + m) * Pitch + n;
            float4 v;
            if constexpr (Cluster > 1)
                v = load_cluster_float4(cluster_address(shared_address(source), r));
            else
                v = *reinterpret_cast<const float4*>(source);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
    return sum;
}

// Every block of the cluster has the sums of its parts, float [Parts][TileM][Pitch], in its own shared memory. Adds them,
// always in the same order, adds the bias, narrows and stores rows m0.. and columns n0.. of `out` [M, N] ([M, N / 2] behind an
// activation). A block's first `Threads` threads do the work. They wait for the sums first: at the cluster's barrier, or without
// a cluster in `meet`. `work`: norm and residual stream (epilogue/rows.cuh), or PlainRows.
template <typename E, Activation ACTIVATION, int TileM, int TileN, int Pitch, int Parts, int Cluster, int Threads, typename Meet,
          typename RowWork = PlainRows>
__device__ __forceinline__ void reduce_and_store(const float* buffer, const u16* bias, u16* out, i64 out_stride, int m0,
                                                 int n0, int M, int N, u32 rank, Meet meet, RowWork work = RowWork()) {
    if constexpr (Cluster > 1) {
        FAULT_SITE(pulled_sums_met, cluster_arrive(); cluster_wait();)
    } else {
        FAULT_SITE(block_sums_met, meet();)
    }

    const int rows = FAULT_SITE(rows_of_result, min(TileM, M - m0)), columns = min(TileN, N - n0);
    static_assert(Pitch % 4 == 0 && TileN % 4 == 0, "sums are read four at a time");
    constexpr bool GATED = ACTIVATION != Activation::NONE;
    static_assert(!GATED || TileN % 128 == 0, "a block has gate and up of the same columns");
    constexpr int STORED = GATED ? TileN / 2 : TileN;
    const auto added = [&](int m, int n) {
        float4 sum = add_parts<TileM, Pitch, Parts, Cluster>(buffer, m, n);
        work.scale(sum, m);
        if (bias != nullptr) {
            sum.x += E::widen(bias[n0 + n]), sum.y += E::widen(bias[n0 + n + 1]);
            sum.z += E::widen(bias[n0 + n + 2]), sum.w += E::widen(bias[n0 + n + 3]);
        }
        return sum;
    };
    // Lanes without columns to store still take part where a warp sums its rows.
    constexpr bool WHOLE_WARPS = RowWork::WHOLE_WARPS;
    static_assert(!GATED || !WHOLE_WARPS, "rows are added up without an activation");
    const int first = rank * Threads + threadIdx.x, fours = rows * (STORED / 4);
    for (int four = first; four < (WHOLE_WARPS ? (fours + 31) / 32 * 32 : fours); four += Cluster * Threads) {
        const int m = four / (STORED / 4), stored = four % (STORED / 4) * 4;
        const int n = GATED ? stored / 64 * 128 + stored % 64 : stored;
        // Columns past N are not stored, so nothing would wait for their loads before the relaxed arrival below.
        const bool mine = FAULT_SITE(columns_of_result, n < columns && (!WHOLE_WARPS || four < fours));
        if (!WHOLE_WARPS && !mine) continue;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        if (mine) sum = added(m, n);
        if constexpr (GATED) {
            const float4 up = added(m, n + 64);
            sum.x = activation<ACTIVATION>(sum.x) * up.x, sum.y = activation<ACTIVATION>(sum.y) * up.y;
            sum.z = activation<ACTIVATION>(sum.z) * up.z, sum.w = activation<ACTIVATION>(sum.w) * up.w;
        }
        work.template add<E>(sum, m0 + m, n0 + n, four == first, mine);
        if (mine)
            store_global(out + (m0 + m) * out_stride + (GATED ? n0 / 2 : n0) + stored,
                         make_uint2(E::narrow(sum.x, sum.y), E::narrow(sum.z, sum.w)));
    }
    // A block stays until its shared memory has been read. Every loaded value has gone into a store by now, so the barrier
    // need not order memory, which would wait for the stores to complete.
    if constexpr (Cluster > 1) {
        FAULT_SITE(pulled_sums_read, cluster_arrive_relaxed(); cluster_wait();)
    }
}
