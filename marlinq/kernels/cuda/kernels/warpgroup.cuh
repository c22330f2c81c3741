// W4A16 GEMM on the warpgroup matrix unit (wgmma) of compute capability 9.0.
//
//   out[m, n] = sum_k x[m, k] * (code[k, n] - zero[g(k), n]) * scale[g(k), n] + bias[n]
//
// The operands are swapped: 64 rows of dequantised weights, in registers, are operand A of wgmma.m64n<TILE_M>k16, and
// TILE_M rows of activations, in shared memory, are operand B. A 16-byte vector of the Marlin layout is one lane's
// share of a 16 (K) x 64 (N) tile, and each of its four words is that lane's A fragment of a 16x16 block. So with a
// warp a tile, word q of all four warps is one 64x16 operand; the rows of the product are merely permuted:
//
//   WORDS = 4   warp w of a warpgroup owns tile w (256 columns a warpgroup); it feeds four products a k16 row, q = 0..3
//   WORDS = 2   warp w owns words 2 (w % 2) + {0, 1} of tile w / 2 (128 columns a warpgroup); two products a row
//   WORDS = 1   warp w owns word w of the only tile (64 columns a warpgroup); one product a row
//   accumulator i of product q: n = 64 tile + 16 q + l/4 + 8 (i/2 % 2),  m = 8 (i/4) + 2 (l%4) + i%2
//
// Division of work. A block owns one column tile, TILE_M rows of the batch and one slice of K's chunks; the blocks of a
// cluster own the slices of one tile (schedule/tile_work.cuh). The warpgroups of a block:
//
//   0 .. CONSUMERS - 1   multiply (mma/warpgroup_loop.cuh): WARPGROUPS_N side by side share a chunk, and chunk j of the slice
//                        belongs to part j % PARTS_K
//   CONSUMERS            warp 0: one thread is the TMA producer (tma/producer.cuh)
//                        warp 1: with STREAM_K, one thread exchanges flags with other blocks (reduce/stream_k_fixup.cuh)
//                        warps 2, 3: with STORE_WARPS, store finished tiles (epilogue/store_warps.cuh)
//
// Ends of a tile:
//
//   split-K, PUSH_SUMS   small tiles: warps push their sums to the blocks that own them (reduce/dsmem_push.cuh); faster,
//                        but takes memory beside the ring
//   split-K              sums meet in the memory of the ring and through DSMEM (reduce/dsmem_pull.cuh)
//   otherwise            a block takes tile after tile, the producer running ahead into the next one while the consumers
//                        store theirs (epilogue/transposed_store.cuh) or, with STORE_WARPS, leave all but the block's last
//                        tile to the two warps
//
// SCALING: the values that scales multiply (scale/scaling.cuh). FUSED: if a chunk's scales outgrow their columns' normalizers, the
// loop waits for its products, adapts sums and normalizers, and goes on. SUMS takes a second set of accumulators, WEIGHTS more
// instructions a weight.
//
// With a PAIR_ACTIVATION, a block has one tile, whose sums meet in shared memory even if K is not split.
//
// Where activations still lack their norm (kernels/warpgroup_rows.cuh), warps 1 to 3 of the last warpgroup make the rows' factors
// during the product.
//
// Configuration: Codec, PAIR_ACTIVATION (reduce/dsmem_pull.cuh), TILE_M, WORDS, WARPGROUPS_N, PARTS_K, ROWS (of 16 channels, a chunk), QUANT_GROUP (channels; 0: all of
// K), ZEROS (stored zero points), SCALING, CLUSTER, STAGES, WINDOW, MIN_BLOCKS, STREAM_K, STORE_WARPS, PUSH_SUMS,
// CONSUMER_REGISTERS and PRODUCER_REGISTERS (setmaxnreg; 0: as launched), and SHARED_BYTES, the host's count of dynamic shared
// memory.
#pragma once
#include "fault_site.cuh"
#include "kernels/warpgroup_shape.cuh"
#include "mma/warpgroup_loop.cuh"
#include "reduce/dsmem_pull.cuh"
#include "reduce/stream_k_fixup.cuh"
#include "schedule/tile_order.cuh"
#include "schedule/tile_work.cuh"
#include "tma/producer.cuh"

template <typename C, typename Shape = WarpgroupShape<C>, typename Loop = WarpgroupLoop<Shape>>
struct WarpgroupGemm {
    typedef typename Shape::Layout Layout;
    typedef typename Shape::Transposed Transposed;
    typedef typename Shape::Stored Stored;
    typedef TileWork<Shape> Work;
    static constexpr int TILE_M = Shape::TILE_M, TILE_N = Shape::TILE_N, PRODUCTS = Shape::PRODUCTS, CLUSTER = Shape::CLUSTER;
    static constexpr int CONSUMERS = Shape::CONSUMERS, WARPGROUPS_N = Shape::WARPGROUPS_N, PARTS_K = Shape::PARTS_K;
    static constexpr int STAGES = Shape::STAGES, WORDS = Shape::WORDS, THREADS = Shape::THREADS;
    static constexpr bool STREAM_K = Shape::STREAM_K, STORE_WARPS = Shape::STORE_WARPS, PUSH_SUMS = Shape::PUSH_SUMS;

    // `rows`: norm and residual stream (epilogue/rows.cuh), or PlainRows; `factors`: the factors of the norm, if there is one.
    template <typename RowWork = PlainRows>
    static __device__ __forceinline__ void run(const typename Layout::Activations& x, const WeightMaps& maps,
                                               const u16* __restrict__ scales, const u16* __restrict__ zeros,
                                               const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,
                                               i64 out_stride, int dependent, float* partials, u32* flags,
                                               RowWork rows = RowWork(), float* factors = nullptr) {
        constexpr bool NORMED = RowWork::NORMED, ADDS = RowWork::ADDS;
        static_assert(Shape::SPLIT || !(NORMED || ADDS), "rows are worked on where sums meet");
        extern __shared__ __align__(1024) unsigned char shared[];
        __shared__ __align__(8) u64 barriers[2 * STAGES + 2 + 2 * WARPGROUPS_N * STORE_WARPS + NORMED];

        const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
        const int warpgroup = uniform(threadIdx.x / 128);
        const int rank = blockIdx.x % CLUSTER;
        const TileOrder<TILE_M, TILE_N> order(M, N);
        const int chunks = Layout::chunks(K);

        // With few words a lane the compiler would compute the address for every chunk, from a special register that is slow
        // to read.
        const u32 first_barrier = WORDS == 1 ? opaque(shared_address(barriers)) : shared_address(barriers);
        Ring<Layout> ring(shared, first_barrier, warpgroup == CONSUMERS);
        const u32 extra_barriers = first_barrier + 16 * STAGES, all_left = extra_barriers, all_there = all_left + 8;
        // Barriers of warpgroup g with STORE_WARPS: its results are in shared memory; they have been stored.
        const auto staged = [&](int g) { return all_there + 8 + 16 * g; };
        const auto drained = [&](int g) { return all_there + 16 + 16 * g; };
        const u32 factors_there = all_there + 8;
        const auto scratch_of = [&](int g) { return ring.stages + Layout::RING_BYTES + g * Shape::EPILOGUE_BYTES; };
        const typename Shape::Push push(ring.stages + Layout::RING_BYTES, extra_barriers, rank);
        if (warpgroup == CONSUMERS && warp == 0 && elected()) {
            if (STREAM_K) {
                barrier_init(all_left, CONSUMERS * 4);
                barrier_init(all_there, 1);
            }
            if (PUSH_SUMS) push.init();
            if (NORMED) barrier_init(factors_there, FAULT_SITE(factor_warps, 3));
            for (int g = 0; g < WARPGROUPS_N * STORE_WARPS; ++g)
                barrier_init(staged(g), 4), barrier_init(drained(g), Stored::WARPS);
            ring.init(0, STAGES, FAULT_SITE(stage_arrivals, WARPGROUPS_N * 4));
            const Work work(order.tiles(), chunks);
            const TilePlace at = order.place(work.tile);
            if (work.left()) Producer<Layout>(x, maps, M, K, at.m0, at.n0).start(ring, work.begin, work.count);
        }
        __syncthreads();
        // Relaxed: other blocks need only the barriers, whose initialisation has a fence of its own.
        if (PUSH_SUMS) cluster_arrive_relaxed();

        float* buffer = reinterpret_cast<float*>(shared);
        const auto reduce = [&](auto threads) {
            const TilePlace at = order.place(blockIdx.x / CLUSTER);
            reduce_and_store<typename Shape::E, C::PAIR_ACTIVATION, TILE_M, TILE_N, Shape::PITCH, PARTS_K, CLUSTER, decltype(threads)::value>(
                buffer, bias, out, out_stride, at.m0, at.n0, M, N, rank,
                [&] {
                    barrier_sync(1, CONSUMERS * 128);
                    FAULT_SITE(met_factors, if (NORMED) barrier_wait(factors_there, 0);)
                },
                rows);
        };
        // Requests the residuals; called by the threads that will add sums to them.
        const auto request = [&] {
            FAULT_SITE(residual_waits, if (dependent) wait_for_previous_kernel();)
            const TilePlace at = order.place(blockIdx.x / CLUSTER);
            if constexpr (PUSH_SUMS)
                return push.request(rows, at.m0, at.n0, M, N, warpgroup * 4 + warp, lane);
            else
                return rows.request(at.m0, at.n0, rank, min(TILE_M, M - at.m0));
        };
        if (warpgroup == CONSUMERS) {
            if constexpr (Shape::PRODUCER_REGISTERS > 0) registers_shrink<Shape::PRODUCER_REGISTERS>();
            if (warp == 0 && elected()) {
                // Otherwise the compiler computes the address for every chunk, from a special register that is slow to read.
                ring.stages = opaque(ring.stages);
                Window<Layout> window(ring);
                bool begun = true;
                for (Work work(order.tiles(), chunks); work.left(); work.next()) {
                    const TilePlace at = order.place(work.tile);
                    const Producer<Layout> producer(x, maps, M, K, at.m0, at.n0);
                    if (begun)
                        producer.go_on(ring, window, work.begin, work.count, dependent);
                    else
                        producer.fill(ring, window, work.begin, work.count);
                    begun = false;
                }
                launch_dependents();
            }
            if constexpr (NORMED) {
                if (warp > 0) {
                    FAULT_SITE(squares_wait, if (dependent) wait_for_previous_kernel();)
                    const int m0 = order.place(blockIdx.x / CLUSTER).m0;
                    share_factors<TILE_M, 3>(rows.given, m0, min(TILE_M, M - m0), factors, warp - 1);
                    __syncwarp();
                    if (lane == 0) barrier_arrive(factors_there);
                }
            }
            if (STREAM_K && warp == 1 && lane == 0)
                exchange_flags(Work(order.tiles(), chunks), flags, all_left, all_there, dependent);
            if (STORE_WARPS && warp >= 4 - Stored::WARPS) {
                u32 parity = 0;
                for (Work work(order.tiles(), chunks); work.left(); work.next()) {
                    if (work.lacks_end() || work.last()) continue;
                    const TilePlace at = order.place(work.tile);
#pragma unroll 1
                    for (int g = 0; g < WARPGROUPS_N; ++g) {
                        const int n = FAULT_SITE(warpgroup_columns, at.n0 + g * Shape::WARPGROUP_COLUMNS);
                        FAULT_SITE(warpgroup_waits_for_staged, barrier_wait(staged(g), parity);)
                        Stored::store(scratch_of(g), out + at.m0 * out_stride + n, out_stride, min(TILE_M, M - at.m0), N - n,
                                      warp - (4 - Stored::WARPS), lane);
                        __syncwarp();
                        if (lane == 0) FAULT_SITE(warpgroup_drained, barrier_arrive(drained(g));)
                    }
                    parity ^= 1;
                }
            }
            // The barriers at the end need whole warps.
            __syncwarp();
            if constexpr (ADDS && CLUSTER > 1 && !PUSH_SUMS) request();
        } else {
            FAULT_SITE(consumer_registers, if constexpr (Shape::CONSUMER_REGISTERS > 0) registers_grow<Shape::CONSUMER_REGISTERS>();)
            const int part = PARTS_K == 1 ? 0 : warpgroup / WARPGROUPS_N, column_group = warpgroup % WARPGROUPS_N;
            const int my_tile = column_group * WORDS + warp * WORDS / 4;
            const int word = warp * WORDS % 4;
            const int first_column = my_tile * 64 + 16 * word;
            Loop loop(ring, shared, part, my_tile, word, lane);

            typename RowWork::Addend addend = {};
            if constexpr (ADDS) addend = request();

            u32 drained_parity = 0;
            for (Work work(order.tiles(), chunks); work.left(); work.next()) {
                const TilePlace at = order.place(work.tile);
                float sums[PRODUCTS][TILE_M / 2];
                const int column = min(at.n0 + my_tile * 64, N - 64);
                PerColumn<PRODUCTS> units;
                if constexpr (Layout::SUM_CHANNELS > 0)
                    units = loop.multiply(sums, work.begin, work.count, scales + column, N, K);
                else
                    units = loop.multiply(sums, work.count, scales + column, zeros + column);
                if constexpr (PUSH_SUMS) {
                    // Wait until the blocks that receive sums have started and initialised their barriers.
                    FAULT_SITE(warpgroup_owner_begun, cluster_wait();)
#pragma unroll
                    for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
                        for (int c = 0; c < TILE_M / 8; ++c) {
                            const float *v = sums[q] + 4 * c, *unit = units.of[q];
                            const float four[4] = {v[0] * unit[0], v[1] * unit[0], v[2] * unit[1], v[3] * unit[1]};
                            push.send(four, FAULT_SITE(warpgroup_part, rank * PARTS_K + part), first_column / 16 + q, c, lane);
                        }
                    FAULT_SITE(pushed_factors, if (NORMED) barrier_wait(factors_there, 0);)
                    push.template add_and_store<CONSUMERS * 4>(bias == nullptr ? nullptr : bias + at.n0,
                                                               out + at.m0 * out_stride + at.n0, out_stride, M - at.m0,
                                                               N - at.n0, dependent, warpgroup * 4 + warp, lane, rows, at.m0,
                                                               at.n0, addend);
                } else if constexpr (Shape::SPLIT) {
                    // When all consumers are here all stages are read; their memory becomes the buffer [part][m][n].
                    barrier_sync(1, CONSUMERS * 128);
#pragma unroll
                    for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
                        for (int i = 0; i < TILE_M / 2; ++i) {
                            const int m = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                            const int n = first_column + 16 * q + lane / 4 + 8 * (i / 2 % 2);
                            buffer[(part * TILE_M + m) * Shape::PITCH + n] = sums[q][i] * units.of[q][i / 2 % 2];
                        }
                    // Without a cluster the producer's warpgroup has nothing to wait for.
                    if constexpr (CLUSTER == 1) reduce(Number<CONSUMERS * 128>());
                } else {
                    const int n = at.n0 + first_column;
                    if constexpr (STREAM_K) {
                        const int my_warp = warpgroup * 4 + warp;
                        constexpr int WARPS = CONSUMERS * 4;
                        if (work.lacks_end()) {
                            if (n < N)
                                leave_sums(sums, units, partials + (blockIdx.x * WARPS + my_warp) * WARP_SUMS<Shape>, lane);
                            FAULT_SITE(sums_left, __syncwarp();)
                            if (lane == 0) barrier_arrive(all_left);
                            continue;
                        }
                        if (work.begin > 0) {
                            FAULT_SITE(sums_there, barrier_wait(all_there, 0);)
                            for (int block = blockIdx.x; n < N && work.lacks_begin(block);) {
                                add_sums(sums, units, partials + (--block * WARPS + my_warp) * WARP_SUMS<Shape>, lane);
                                units.set(1.f);
                            }
                        }
                    }
                    const PerColumn<PRODUCTS> shifts =
                        Transposed::load_bias(bias == nullptr || n >= N ? nullptr : bias + n, lane);
                    if constexpr (STORE_WARPS) {
                        // Until the tile before has been stored; a new barrier counts as past its odd phase.
                        FAULT_SITE(warpgroup_waits_for_drained, barrier_wait(drained(warpgroup), drained_parity ^= 1);)
                        if (FAULT_SITE(warpgroup_last_tile, !work.last())) {
                            const u32 to = scratch_of(warpgroup) + warp * Transposed::COLUMNS * 2;
#pragma unroll
                            for (int turn = 0; turn < Transposed::TURNS; ++turn)
                                Transposed::transpose(turn, sums, units, shifts, to + turn * Transposed::ROWS * Stored::PITCH,
                                                      Stored::PITCH, lane);
                            __syncwarp();
                            if (lane == 0) FAULT_SITE(warpgroup_staged, barrier_arrive(staged(warpgroup));)
                            continue;
                        }
                    }
                    if (n < N)
                        Transposed::store(sums, units, shifts, scratch_of(warpgroup) + warp * Transposed::BYTES,
                                          out + at.m0 * out_stride + n, out_stride, M - at.m0, lane);
                }
            }
        }
        if constexpr (CLUSTER > 1 && !PUSH_SUMS) reduce(Number<THREADS>());
    }
};

#define INSTANTIATE_W4A16_WGMMA(NAME, CONFIGURATION)                                                                \
    extern "C" __global__ void __launch_bounds__(WarpgroupGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)  \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                              \
    NAME(const __grid_constant__ ActivationMaps x, const __grid_constant__ WeightMaps maps,                         \
         const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,               \
         u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent, float* partials, u32* flags) {  \
        WarpgroupGemm<CONFIGURATION>::run(x, maps, scales, zeros, bias, out, M, N, K, out_stride, dependent,        \
                                          partials, flags);                                                         \
    }
