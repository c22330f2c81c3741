// Grouped W4A16 products of sorted rows with the experts that they were routed to, on wgmma (compute capability 9.0).
//
//   out[r, n] = sum_k x[r, k] * weight[expert(r)][k, n]                     down
//   out[r, j] = activation(gate[r, j]) * up[r, j]                           gate and up, GATED
//
// and with BIASED a bias of the expert's: bias[expert(r)][n], or those of gate and up.
//
// The main loop, the ring and the fragments are those of kernels/warpgroup.cuh. The grid is persistent: a block takes tile after
// tile of all experts (experts/records.cuh); how many there are is known on the GPU only. The words of all experts are one
// tensor [E * K/16, N/64, 128], so a tile of expert e begins e * K/16 planes later. A tile's rows may end before TILE_M: those
// behind belong to the next expert, are multiplied, and are not stored.
//
// GATED: 16 columns of gate and 16 of up alternate, so that neighbouring products of a lane hold gate and up of one channel.
//
// HERE: number of pairs up to which every block sorts the pairs for itself (experts/few_pairs.cuh); 0: another kernel has sorted
// them. With HERE, gate and up load the rows of the batch one by one into the rows of a tile; rows of a stage without a pair keep
// their old contents, and their results are not stored. Separate warps issue these copies: lanes with different operands copy one
// after the other, 80 cycles each, which would delay the words.
//
// A block's last chunk of an expert may reach into the next expert's weights where K is no multiple of a chunk. Activations past
// K are zeros, and weights are finite.
//
// Configuration: that of kernels/warpgroup.cuh (no split of K, one warpgroup or more side by side), GATED, BIASED, ACTIVATION,
// GROUPED_SHARED_BYTES, HERE; where pairs are sorted here, EXPERTS (a multiple of 32), WIDE (64-bit ids), SORTING_BYTES.
#pragma once
#include "fault_site.cuh"
#include "experts/few_pairs.cuh"
#include "experts/records.cuh"
#include "kernels/warpgroup_shape.cuh"
#include "mma/warpgroup_loop.cuh"
#include "step/activate.cuh"
#include "tma/producer.cuh"

template <typename C>
struct ExpertsWarpgroup {
    typedef WarpgroupShape<C> Shape;
    typedef typename Shape::Layout Layout;
    static constexpr int TILE_M = Shape::TILE_M, TILE_N = Shape::TILE_N, PRODUCTS = Shape::PRODUCTS, WORDS = Shape::WORDS;
    static constexpr int CONSUMERS = Shape::CONSUMERS, STAGES = Shape::STAGES, THREADS = Shape::THREADS;
    static constexpr int QUANT_GROUP = Shape::QUANT_GROUP;
    static constexpr bool GATED = C::GATED;
    static constexpr bool HERE = C::HERE > 0, GATHERS = HERE && GATED;
    static_assert(!Shape::SPLIT && !Shape::STREAM_K && !Shape::STORE_WARPS, "a block takes whole tiles and stores them");
    static_assert(!GATHERS || (Layout::SLABS < 4 && TILE_M <= 32), "a warp gathers for each slab, a lane a row");
    static_assert(!GATED || WORDS % 2 == 0, "gate and up of a channel are products of one lane");

    static constexpr int STORED = GATED ? PRODUCTS / 2 : PRODUCTS;  // 16-column blocks that a warp stores
    typedef TransposedStore<typename Shape::E, STORED, TILE_M> Transposed;
    // Bytes of a warpgroup's epilogue behind the ring. A single block of columns needs more than the dense kernel's pairs.
    static constexpr int EPILOGUE_BYTES =
        4 * Transposed::BYTES > Shape::EPILOGUE_BYTES ? 4 * Transposed::BYTES : Shape::EPILOGUE_BYTES;
    static_assert(C::GROUPED_SHARED_BYTES == Shape::ALIGNED_RING_BYTES + CONSUMERS * EPILOGUE_BYTES,
                  "host and kernel count different bytes of shared memory");

    // Requests the operands of a tile's chunks; one thread.
    struct Copies {
        const TensorMap& x;
        const WeightMaps& maps;
        int row, rows, tile, plane, group;  // sorted row, 64-column tile, first plane of words, first quantisation group

        __device__ __forceinline__ Copies(const TensorMap& activations, const WeightMaps& weights, const ExpertTile& at, int K)
            : x(activations),
              maps(weights),
              row(at.m0),
              rows(at.rows),
              tile(at.n0 / 64),
              plane(FAULT_SITE(expert_plane, at.expert * (K / 16))),
              group(QUANT_GROUP == 0 ? 0 : at.expert * (K / (QUANT_GROUP == 0 ? 1 : QUANT_GROUP))) {}

        __device__ __forceinline__ void weights(const Ring<Layout>& ring, int chunk) const {
            const u32 at = ring.address(), barrier = ring.full + 8 * ring.stage;
            barrier_expect(barrier, Layout::COPIED_BYTES - (GATHERS ? FAULT_SITE(gathered_bytes, Layout::SLABS * 128 * (TILE_M - rows)) : 0));
            copy_box_once(at + Layout::WEIGHTS_AT, &maps.words, 0, tile, plane + chunk * Layout::ROWS, barrier);
            const int from = group + Producer<Layout>::first_quant_group(chunk);
            if (QUANT_GROUP != 0) copy_box_once(at + Layout::SCALES_AT, &maps.scales, 0, tile, from, barrier);
            if (QUANT_GROUP != 0 && Layout::ZEROS) copy_box_once(at + Layout::ZEROS_AT, &maps.zeros, 0, tile, from, barrier);
        }
        __device__ __forceinline__ void activations(const Ring<Layout>& ring, int chunk) const {
            if constexpr (GATHERS) return;
            const u32 at = ring.address(), barrier = ring.full + 8 * ring.stage;
#pragma unroll
            for (int slab = 0; slab < Layout::SLABS; ++slab)
                copy_box(at + slab * Layout::SLAB_BYTES, &x, chunk * Layout::CHUNK + slab * 64, row, barrier);
        }
    };

    // A warp that gathers the rows of all tiles for one slab, a lane a row. The swizzle is that of the address, so boxes of a row
    // land as rows of a box do. Bytes may arrive before the producer's warp expects them: its arrival ends the phase.
    template <typename Order>
    static __device__ __forceinline__ void gather(Ring<Layout> ring, const TensorMap& x, const u16* sources, const Order& order,
                                                  int tiles, int chunks, int slab, int lane) {
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const ExpertTile at = order.find(tile);
            const int row = lane < at.rows ? sources[at.m0 + lane] : 0;
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
                ring.wait_empty();
                if (lane < at.rows)
                    copy_box(ring.address() + slab * Layout::SLAB_BYTES + FAULT_SITE(gathered_row, lane * 128), &x, chunk * Layout::CHUNK + slab * 64, row,
                             ring.full + 8 * ring.stage);
                // Keeps lanes without a row, for which nothing waits, from missing a phase of the barrier.
                __syncwarp();
            }
        }
    }

    // The TMA producer. The first chunks' weights need nothing of the previous kernel if the records are there already.
    template <typename Order>
    static __device__ __forceinline__ void produce(Ring<Layout> ring, const TensorMap& x, const WeightMaps& maps,
                                                   const Order& order, int tiles, int chunks, int K, int dependent) {
        ring.stages = opaque(ring.stages);
        Window<Layout> window(ring);
        int tile = blockIdx.x, ahead = 0;
        if (tile < tiles) {
            const Copies copies(x, maps, order.find(tile), K);
            const Ring<Layout> first = ring;
            ahead = min(Layout::AHEAD, chunks);
#pragma unroll 1
            for (int i = 0; i < ahead; ++i, ring.advance()) copies.weights(ring, i);
            FAULT_SITE(expert_rows_wait, if (dependent) wait_for_previous_kernel();)
            ring = first;
#pragma unroll 1
            for (int i = 0; i < ahead; ++i, ring.advance()) copies.activations(ring, i);
            window.chunks = ahead;
        } else if (dependent) {
            // The next kernel relies on this wait: when all blocks have let it begin, the kernel before this one has ended.
            wait_for_previous_kernel();
        }
        for (; tile < tiles; tile += gridDim.x, ahead = 0) {
            const Copies copies(x, maps, order.find(tile), K);
#pragma unroll 1
            for (int chunk = ahead; chunk < chunks; ++chunk, ring.advance()) {
                window.admit();
                ring.wait_empty();
                copies.weights(ring, chunk);
                copies.activations(ring, chunk);
            }
        }
        launch_dependents();
    }

    static __device__ __forceinline__ void run(const TensorMap& x, const WeightMaps& maps, const u16* __restrict__ scales,
                                               const u16* __restrict__ zeros, const u16* __restrict__ bias,
                                               u16* __restrict__ out, const ExpertRecord* records, const int* tile_count,
                                               const PairsGiven& given, int N, int K, int dependent, int behind_route) {
        extern __shared__ __align__(1024) unsigned char shared[];
        __shared__ __align__(8) u64 barriers[2 * STAGES];

        const int warp = uniform(threadIdx.x / 32 % 4), warpgroup = uniform(threadIdx.x / 128);
        Ring<Layout> ring(shared, shared_address(barriers), warpgroup == CONSUMERS);
        if (warpgroup == CONSUMERS && warp == 0 && elected()) ring.init(0, STAGES, CONSUMERS * 4);
        // Where the previous kernel sorts pairs or chooses experts, wait for it first.
        if constexpr (HERE) {
            typedef FewPairs<THREADS, C::EXPERTS, C::HERE, TILE_M, C::WIDE> Pairs;
            static_assert(C::SORTING_BYTES == sizeof(Pairs), "host and kernel count different bytes of static shared memory");
            __shared__ Pairs pairs;
            pairs.clear();
            FAULT_SITE(pairs_wait, if (behind_route) wait_for_previous_kernel();)
            const int tiles = pairs.sort(given);
            const ExpertTiles<TILE_M, TILE_N, Pairs> order(pairs, N);
            work(ring, shared, x, maps, scales, zeros, bias, out, pairs.sources, order, tiles * order.tiles_n, K, dependent,
                 behind_route);
        } else {
            __syncthreads();
            FAULT_SITE(records_wait, if (behind_route) wait_for_previous_kernel();)
            const StoredRecords stored{records};
            const ExpertTiles<TILE_M, TILE_N, StoredRecords> order(stored, N);
            const int tiles = (int)load_l2_word(reinterpret_cast<const u32*>(tile_count));
            work(ring, shared, x, maps, scales, zeros, bias, out, nullptr, order, tiles * order.tiles_n, K, dependent, behind_route);
        }
    }

    template <typename Order>
    static __device__ __forceinline__ void work(Ring<Layout>& ring, unsigned char* shared, const TensorMap& x, const WeightMaps& maps,
                                                const u16* __restrict__ scales, const u16* __restrict__ zeros,
                                                const u16* __restrict__ bias, u16* __restrict__ out, const u16* sources,
                                                const Order& order, int tiles, int K, int dependent, int behind_route) {
        const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4), warpgroup = uniform(threadIdx.x / 128);
        const int chunks = (K + Shape::CHUNK - 1) / Shape::CHUNK, N = order.N;
        if (warpgroup == CONSUMERS) {
            if constexpr (Shape::PRODUCER_REGISTERS > 0) registers_shrink<Shape::PRODUCER_REGISTERS>();
            if (warp == 0 && elected()) produce(ring, x, maps, order, tiles, chunks, K, dependent && !behind_route);
            if (GATHERS && warp > 0 && warp <= Layout::SLABS) gather(ring, x, sources, order, tiles, chunks, warp - 1, lane);
        } else {
            if constexpr (Shape::CONSUMER_REGISTERS > 0) registers_grow<Shape::CONSUMER_REGISTERS>();
            const int my_tile = warpgroup * WORDS + warp * WORDS / 4, word = warp * WORDS % 4;
            const int first_column = my_tile * 64 + 16 * word;
            const u32 scratch = ring.stages + Layout::RING_BYTES + warpgroup * EPILOGUE_BYTES + warp * Transposed::BYTES;
            const int stored_columns = GATED ? N / 2 : N;
            WarpgroupLoop<Shape> loop(ring, shared, 0, my_tile, word, lane);
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const ExpertTile at = order.find(tile);
                float sums[PRODUCTS][TILE_M / 2];
                // Scales per channel are not part of a stage.
                const i64 column = QUANT_GROUP == 0 ? (i64)at.expert * N + min(at.n0 + my_tile * 64, N - 64) : 0;
                PerColumn<PRODUCTS> units = loop.multiply(sums, chunks, scales + column, zeros + column);
                const int n = at.n0 + first_column;
                if (n >= N) continue;
                u16* to = out + (i64)at.m0 * stored_columns + (GATED ? n / 2 : n);
                const PerColumn<PRODUCTS> shifts = TransposedStore<typename Shape::E, PRODUCTS, TILE_M>::load_bias(
                    C::BIASED ? bias + (i64)at.expert * N + n : nullptr, lane);
                if constexpr (GATED) {
                    float inner[STORED][TILE_M / 2];
                    PerColumn<STORED> ones, nothing;
                    ones.set(1.f), nothing.set(0.f);
#pragma unroll
                    for (int q = 0; q < STORED; ++q)
#pragma unroll
                        for (int i = 0; i < TILE_M / 2; ++i)
                            inner[q][i] = gated<C::ACTIVATION>(
                                fmaf(sums[2 * q][i], units.of[2 * q][i / 2 % 2], shifts.of[2 * q][i / 2 % 2]),
                                fmaf(sums[2 * q + 1][i], units.of[2 * q + 1][i / 2 % 2], shifts.of[2 * q + 1][i / 2 % 2]));
                    Transposed::store(inner, ones, nothing, scratch, to, stored_columns, at.rows, lane);
                } else {
                    Transposed::store(sums, units, shifts, scratch, to, stored_columns, at.rows, lane);
                }
                // The next tile is transposed in the same memory.
                __syncwarp();
            }
        }
    }
};

#define INSTANTIATE_EXPERTS_WGMMA(NAME, CONFIGURATION)                                                                    \
    extern "C" __global__ void __launch_bounds__(ExpertsWarpgroup<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)     \
    NAME(const __grid_constant__ TensorMap x, const __grid_constant__ WeightMaps maps, const u16* __restrict__ scales,    \
         const u16* __restrict__ zeros, const u16* __restrict__ bias, u16* __restrict__ out, const ExpertRecord* records, \
         const int* tile_count, PairsGiven given, int N, int K, int dependent, int behind_route) {                        \
        ExpertsWarpgroup<CONFIGURATION>::run(x, maps, scales, zeros, bias, out, records, tile_count, given, N, K, dependent, \
                                             behind_route);                                                               \
    }
