// W4A16 GEMM for small batches on compute capability 9.0 and later: the stream kernel's products, with operands by TMA.
//
//   out[m, n] = sum_k x[m, k] * (code[k, n] - zero[g(k), n]) * scale[g(k), n] + bias[n]
//
// Operands and fragments are those of the stream kernel (kernels/stream.cuh); copies and waits differ.
// A block owns 64*WARPS_N columns, 8*BLOCKS_M rows of the batch and a slice of K's chunks; the blocks of a cluster own
// the slices of one tile. One thread of an extra warp is the TMA producer (tma/producer.cuh). Chunk j of the slice is multiplied
// by the WARPS_N warps of part j % WARPS_K. So a chunk's work begins when its own bytes are there, and after the last bytes of
// a slice there is one chunk's work left, whatever the number of warps:
//
//   chunk     | 0     | 1     | 2     | 3     | 4     |   in the order of arrival
//   part      | 0     | 1     | 2     | 0     | 1     |   with WARPS_K = 3
//
// Scales, and with one block of batch rows zero points (mma/quant_group_sums.cuh), are applied to float accumulators at the end of
// a quantisation group or of a chunk. Parts of K are added by a pushed DSMEM reduction (reduce/dsmem_push.cuh), in memory beside
// the ring, so that no warp waits for the ring to drain.
//
// Configuration: Codec, WARPS_N, WARPS_K, BLOCKS_M, ROWS (of 16 channels, a chunk), QUANT_GROUP (channels; 0: all of K), ZEROS (stored zero points),
// CLUSTER, STAGES, WINDOW, MIN_BLOCKS, and SHARED_BYTES, the host's count of dynamic shared memory.
#pragma once
#include "fault_site.cuh"
#include "codec/codecs.cuh"
#include "mma/quant_group_sums.cuh"
#include "reduce/dsmem_push.cuh"
#include "scale/stored_order.cuh"
#include "tma/producer.cuh"

template <typename C>
struct BulkGemm {
    typedef typename C::Codec Codec;
    typedef typename Codec::Element E;

    static constexpr int WARPS_N = C::WARPS_N, WARPS_K = C::WARPS_K, BLOCKS_M = C::BLOCKS_M, CLUSTER = C::CLUSTER;
    static constexpr int QUANT_GROUP = C::QUANT_GROUP;
    static constexpr bool ZEROS = C::ZEROS;
    static constexpr int TILE_M = 8 * BLOCKS_M, TILE_N = 64 * WARPS_N;
    static constexpr int WARPS = WARPS_N * WARPS_K;  // that multiply
    static constexpr int THREADS = 32 * (WARPS + 1);
    static constexpr int PARTS = CLUSTER * WARPS_K;

    typedef StageLayout<C, TILE_M, WARPS_N> Layout;
    static constexpr int STAGES = Layout::STAGES, ROWS = Layout::ROWS, CHUNK = Layout::CHUNK;
    static constexpr int QUANT_GROUP_ROWS = Layout::QUANT_GROUP_ROWS;
    FAULT_SITE(bulk_stages, static_assert(STAGES % WARPS_K == 0, "a stage belongs to one part, which then sees all of its phases");)

    typedef PushedSums<E, TILE_M, TILE_N, PARTS, CLUSTER> Reduction;
    static constexpr int SHARED_BYTES = Layout::RING_BYTES + Layout::ALIGNMENT_BYTES + Reduction::BYTES;
    static_assert(C::SHARED_BYTES == SHARED_BYTES, "host and kernel count different bytes of shared memory");

    typedef Accumulators<BLOCKS_M> Sums;
    static constexpr int STEP = 32 / Codec::ROW_CHANNELS;  // rows at a time: 32 channels
    // Products of STEP rows are summed before scales multiply the sums. Where each of these rows has its own scales, weights are scaled.
    static constexpr bool SCALE_SUMS = QUANT_GROUP_ROWS >= STEP;
    typedef QuantGroupSums<Codec, BLOCKS_M, ZEROS, SCALE_SUMS> GroupSums;

    // B fragments of channels 32 `part` .. + 31, by column block; `slabs` is the chunk's activations.
    static __device__ __forceinline__ void load_activations(u32 (&x)[BLOCKS_M][2][2], u32 slabs, int part, int lane) {
        const u32 slab = slabs + part / 2 * Layout::SLAB_BYTES;
#pragma unroll
        for (int b = 0; b < BLOCKS_M; ++b) {
            const int m = 8 * b + lane % 8, piece = 4 * (part % 2) + GroupSums::piece(lane);
            u32 r[4];
            load_matrix_x4(r, slab + m * 128 + ((piece ^ (m % 8)) * 16));
            x[b][0][0] = r[0], x[b][0][1] = r[1], x[b][1][0] = r[2], x[b][1][1] = r[3];
        }
    }

    // `rows`: norm and residual stream (epilogue/rows.cuh), or PlainRows.
    template <typename RowWork = PlainRows>
    static __device__ __forceinline__ void run(const ActivationMaps& x, const WeightMaps& maps,
                                               const u16* __restrict__ scales, const u16* __restrict__ zeros,
                                               const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,
                                               i64 out_stride, int dependent, const RowWork& rows = RowWork()) {
        static_assert(!RowWork::NORMED, "no warp has time for the factors of rows");
        extern __shared__ __align__(1024) unsigned char shared[];
        __shared__ __align__(8) u64 barriers[2 * STAGES + 1];

        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
        const int tiles_m = (M + TILE_M - 1) / TILE_M;
        // Most launches have one batch tile, and a division takes longer than a barrier.
        const int column_tile = tiles_m == 1 ? tile : tile / tiles_m;
        const int m0 = (tile - column_tile * tiles_m) * TILE_M, n0 = column_tile * TILE_N;
        const int rows_m = min(TILE_M, M - m0);
        const u32 chunks = (K + CHUNK - 1) / CHUNK;
        const int begin = chunks * rank / CLUSTER, count = (int)(chunks * (rank + 1) / CLUSTER) - begin;

        Ring<Layout> ring(shared, shared_address(barriers), warp == WARPS);
        const Reduction reduction(ring.stages + Layout::RING_BYTES, shared_address(barriers + 2 * STAGES), rank);
        const Producer<Layout> producer(x, maps, M, K, m0, n0);
        if (warp == WARPS && elected()) {
            // The first chunk is requested before the other stages have barriers.
            ring.init(0, 1, WARPS_N);
            producer.start(ring, begin, count);
            reduction.init();
            ring.init(1, STAGES, WARPS_N);
        }
        FAULT_SITE(bulk_barriers_made, __syncthreads();)
        // Relaxed: other blocks need only the barriers, whose initialisation has a fence of its own.
        if (CLUSTER > 1) cluster_arrive_relaxed();

        if (warp == WARPS) {
            if (elected()) {
                // Otherwise the compiler computes the address for every chunk, from a special register that is slow to read.
                ring.stages = opaque(ring.stages);
                Window<Layout> window(ring);
                producer.go_on(ring, window, begin, count, dependent);
                launch_dependents();
            }
            return;
        }

        FAULT_SITE(bulk_residual_waits, if (RowWork::ADDS && dependent) wait_for_previous_kernel();)
        const typename RowWork::Addend addend = reduction.request(rows, m0, n0, M, N, warp, lane);
        const int wn = warp % WARPS_N, wk = warp / WARPS_N;
        Sums total;
        total.clear();
        GroupSums group_sums;
        Scales<4> channel_scale, channel_zero;
        if (QUANT_GROUP == 0) {
            const int column = min(n0 + wn * 64, N - 64);
            channel_scale = load_channel_scales<4>(scales + column, 0, lane);
            if (ZEROS) channel_zero = load_channel_scales<4>(zeros + column, 0, lane);
            group_sums.clear();
            group_sums.begin(channel_scale, channel_zero);
        }
        ring.advance(wk);
        for (int chunk = wk; chunk < count; chunk += WARPS_K) {
            FAULT_SITE(bulk_waits_for_stage, ring.wait_full();)
            const u32 activations = ring.address();
            const unsigned char* stage = shared + (activations - shared_address(shared));
            const unsigned char* my_tile = stage + Layout::WEIGHTS_AT + wn * Codec::TILE_BYTES;
            const unsigned char* my_words = my_tile + LaneWords<Codec, 4>::words_offset(0, lane);
            const unsigned char* my_places = my_tile + LaneWords<Codec, 4>::places_offset(0, lane);
#pragma unroll
            for (int i = 0; i < ROWS; i += STEP) {
                const u16* group_scales = reinterpret_cast<const u16*>(
                    stage + Layout::SCALES_AT + i / QUANT_GROUP_ROWS * Layout::SCALE_BYTES + wn * 128);
                const u16* group_zeros = group_scales + (Layout::ZEROS_AT - Layout::SCALES_AT) / 2;
                const auto scale = [&] { return load_group_scales(group_scales, lane); };
                const auto zero = [&] { return ZEROS ? load_group_scales(group_zeros, lane) : Scales<4>(); };
                if (SCALE_SUMS && QUANT_GROUP != 0 && i % QUANT_GROUP_ROWS == 0) {
                    group_sums.clear();
                    group_sums.begin(scale(), zero());
                }
                u32 fragments[BLOCKS_M][2][2];
                load_activations(fragments, activations, i / STEP, lane);
                LaneWords<Codec, 4> words[STEP];
                if constexpr (!SCALE_SUMS) {
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        const u16* row_scales = group_scales + row * (Layout::SCALE_BYTES / 2);
                        const u16* row_zeros = group_zeros + row * (Layout::SCALE_BYTES / 2);
                        group_sums.begin(load_group_scales(row_scales, lane),
                                         ZEROS ? load_group_scales(row_zeros, lane) : Scales<4>());
                        words[row].load(my_words + (i + row) * Layout::ROW_BYTES);
                        group_sums.add_row(total, words[row], row, fragments);
                    }
                    continue;
                }
#pragma unroll
                for (int row = 0; row < STEP; ++row)
                    words[row].load(my_words + (i + row) * Layout::ROW_BYTES, my_places + (i + row) * Layout::ROW_BYTES);
                group_sums.add(total, words, fragments);
                if (QUANT_GROUP != 0 && i % QUANT_GROUP_ROWS == QUANT_GROUP_ROWS - STEP) group_sums.close(total, scale(), zero());
            }
            FAULT_SITE(bulk_stage_read, __syncwarp();)
            if (lane == 0) ring.release();
            ring.advance(WARPS_K);
        }
        if (QUANT_GROUP == 0) group_sums.close(total, channel_scale, channel_zero);

        // Wait until the blocks that receive sums have started and initialised their barriers.
        FAULT_SITE(bulk_owner_begun, if (CLUSTER > 1) cluster_wait();)
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int c = 0; c < BLOCKS_M; ++c) reduction.send(total.value[q][c], rank * WARPS_K + wk, 4 * wn + q, c, lane);
        reduction.template add_and_store<WARPS>(bias == nullptr ? nullptr : bias + n0, out + m0 * out_stride + n0, out_stride, rows_m,
                                      N - n0, dependent, warp, lane, rows, m0, n0, addend);
    }
};

#define INSTANTIATE_W4A16_BULK(NAME, CONFIGURATION)                                                                 \
    extern "C" __global__ void __launch_bounds__(BulkGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)       \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                              \
    NAME(const __grid_constant__ ActivationMaps x, const __grid_constant__ WeightMaps maps,                         \
         const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,               \
         u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent) {                               \
        BulkGemm<CONFIGURATION>::run(x, maps, scales, zeros, bias, out, M, N, K, out_stride, dependent);            \
    }
