// W4A16 GEMM that streams weights from global memory straight into tensor-core registers.
//
//   out[m, n] = sum_k x[m, k] * (code[k, n] - zero[g(k), n]) * scale[g(k), n] + bias[n]
//
// The operands are swapped: weights are the A operand of mma.m16n8k16 (16 rows of N), activations the B operand
// (8 columns of M), so that a batch of 8 fills the tensor core. A 16-byte vector of the Marlin layout is one
// lane's share of a 16 (K) x 64 (N) tile, and its four words are that lane's A fragments of four 16x16 blocks: no
// shared memory, no shuffles, no second copy of the weights.
//
//   lane l of a warp, tile (kt, nt), word q:  n = 64 nt + 16 q + l/4 + {0, 8},  k = 16 kt + 2 (l%4) + {0, 1, 8, 9}
//   accumulator of word q, column block b:    n as above,  m = 8 b + 2 (l%4) + {0, 1}
//
// Division of work. A block owns 64*WARPS_N columns of N, 8*BLOCKS_M rows of the batch, and one slice of K; the blocks of
// a cluster own the slices of one tile. Inside a block, warp (wn, wk) owns 64 columns and the wk-th part of the slice:
//
//   K  | block 0: wk 0 | wk 1 | block 1: wk 0 | wk 1 | ...   each part is a run of chunks of 16*ROWS channels
//
// All operands are copied by cp.async into a ring of STAGES stages in shared memory, one chunk of every warp a stage:
//   weights      [warp][row][plane][lane] 16 bytes (codec/lane_words.cuh); a lane reads back only what it copied itself
//   activations  [wk][m][channel], shared by the warps of a part; 16-byte pieces are swizzled by m so that ldmatrix
//                reads without bank conflicts
//   scales       [warp][quantisation group][scale or zero point][64], shared by the lanes of a warp
// Weights and scales depend on no earlier kernel, so a dependent launch requests those of the first stage before it waits
// for the previous kernel. Requests for more would delay that kernel's own (docs/kernels.md, "Dependent launches").
//
// SCALE_SUMS: scales multiply float accumulators at the end of a quantisation group (exact weights, fewer instructions), and
// with one block of batch rows zero points are also applied to sums (mma/quant_group_sums.cuh). Otherwise scales multiply the
// dequantised weights in 16 bits (no second set of accumulators, for large tiles).
// Reduction: parts are added in shared memory, slices through DSMEM, always in the same order, so the result has the same
// bits every time.
//
// DIGITS: a single batch row, by integer products (mma/integer_digits.cuh); BLOCKS_M, ROWS and SCALE_SUMS are 1, 8 and true.
//
// Configuration: Codec, PAIR_ACTIVATION (reduce/dsmem_pull.cuh), WARPS_N, WARPS_K, BLOCKS_M, ROWS, QUANT_GROUP (channels; 0: all of K), ZEROS (stored zero points),
// SCALE_SUMS, DIGITS, CLUSTER, STAGES, MIN_BLOCKS, and SHARED_BYTES, the host's count of dynamic shared memory.
#pragma once
#include "fault_site.cuh"
#include "codec/codecs.cuh"
#include "mma/integer_digits.cuh"
#include "mma/quant_group_sums.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "reduce/dsmem_pull.cuh"
#include "scale/stored_order.cuh"

// Hook between the requests for the first chunks and the product (used by kernels/stream_rows.cuh); this one does nothing.
struct NothingFirst {
    __device__ __forceinline__ void operator()(int, int, u32, int) const {}
};

// Shares K among the parts of a block: evenly, in runs of chunks. A type with the same members may first send a part to another
// weight (kernels/experts_stream.cuh).
template <int PARTS>
struct EvenParts {
    static constexpr u32 COUNT = PARTS;  // parts that share the K of one weight

    // Sets the addresses to the operands of the weight that part `part` multiplies, and `part` to its index among that weight's parts.
    // False if there is no such weight.
    __device__ __forceinline__ bool enter(u32& part, const u16*& x, const uint4*& words, const u16*& scales,
                                          const u16*& zeros) const {
        return true;
    }
};

template <typename C>
struct StreamGemm {
    typedef typename C::Codec Codec;
    typedef typename Codec::Element E;

    static constexpr int WARPS_N = C::WARPS_N, WARPS_K = C::WARPS_K, CLUSTER = C::CLUSTER;
    static constexpr int BLOCKS_M = C::BLOCKS_M, STAGES = C::STAGES, QUANT_GROUP = C::QUANT_GROUP;
    static constexpr bool ZEROS = C::ZEROS, DIGITS = C::DIGITS, SCALE_SUMS = C::SCALE_SUMS;

    static constexpr int CHUNK = 16 * C::ROWS;                   // channels
    static constexpr int ROWS = CHUNK / Codec::ROW_CHANNELS;     // stored rows of a chunk
    static constexpr int STEP = 32 / Codec::ROW_CHANNELS;        // rows at a time: 32 channels
    static constexpr int PIECES = CHUNK / 8;  // 16-byte pieces of a chunk of activations
    static constexpr int TILE_M = DIGITS ? 1 : 8 * BLOCKS_M;
    static constexpr int TILE_N = 64 * WARPS_N;
    static constexpr int WARPS = WARPS_N * WARPS_K;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int QUANT_GROUPS = QUANT_GROUP == 0 || QUANT_GROUP > CHUNK ? 1 : CHUNK / QUANT_GROUP;  // of a chunk
    static constexpr int QUANT_GROUP_ROWS = ROWS / QUANT_GROUPS;
    static_assert(!SCALE_SUMS || QUANT_GROUP <= CHUNK, "sums are scaled at ends of quantisation groups, which end chunks");
    static_assert(!SCALE_SUMS || QUANT_GROUP_ROWS >= STEP, "sums are those of 32 channels");
    static_assert(PIECES >= 8, "the swizzle permutes eight pieces");
    static_assert(!DIGITS || Codec::PLANES == 1, "digits are multiplied with 4-bit codes");
    static_assert(!DIGITS || (BLOCKS_M == 1 && ROWS == 8 && SCALE_SUMS), "digits are made of eight rows");

    // Bytes of a stage, by warp or part.
    static constexpr int WEIGHT_BYTES = ROWS * Codec::TILE_BYTES;
    static constexpr int ACTIVATION_BYTES = TILE_M * CHUNK * 2;
    static constexpr int KINDS = ZEROS ? 2 : 1;
    static constexpr int SCALE_BYTES = QUANT_GROUPS * KINDS * 128;
    static constexpr int ACTIVATIONS_AT = WARPS * WEIGHT_BYTES;
    static constexpr int SCALES_AT = ACTIVATIONS_AT + WARPS_K * ACTIVATION_BYTES;
    static constexpr int STAGE_BYTES = SCALES_AT + WARPS * SCALE_BYTES;
    static constexpr int DIGITS_AT = STAGES * STAGE_BYTES;  // of all warps, behind the ring
    static constexpr int PITCH = TILE_N + 4;  // floats a row of the reduction buffer; 4 avoids bank conflicts

    static constexpr int RING_BYTES = DIGITS_AT + (DIGITS ? WARPS * DIGIT_BYTES : 0);
    static constexpr int REDUCTION_BYTES = WARPS_K * TILE_M * PITCH * 4;
    static constexpr int SHARED_BYTES = RING_BYTES > REDUCTION_BYTES ? RING_BYTES : REDUCTION_BYTES;
    static_assert(C::SHARED_BYTES == SHARED_BYTES, "host and kernel count different bytes of shared memory");

    typedef Accumulators<BLOCKS_M> Sums;
    typedef QuantGroupSums<Codec, BLOCKS_M, ZEROS, SCALE_SUMS> GroupSums;

    // One quantisation group's scales from the warp's 64 columns in shared memory.
    static __device__ __forceinline__ Scales<4> load_scales(const u16* base, int lane) {
        if constexpr (QUANT_GROUP != 0)
            return load_group_scales(base, lane);
        else
            return load_channel_scales_shared(base, lane);
    }
    // The zero points, which lie behind the scales; unspecified where none are stored.
    static __device__ __forceinline__ Scales<4> load_zeros(const u16* scales, int lane) {
        return ZEROS ? load_scales(scales + 64, lane) : Scales<4>();
    }
    // The zero points of symmetric weights.
    static __device__ __forceinline__ Scales<4> midpoints() {
        const u32 pair = Codec::midpoints();
        return {{pair, pair, pair, pair}};
    }

    // B fragments of channels 32 `part` .. + 31, by column block; `tile` is the chunk's activations.
    static __device__ __forceinline__ void load_activations(u32 (&x)[BLOCKS_M][2][2], u32 tile, int part, int lane) {
#pragma unroll
        for (int b = 0; b < BLOCKS_M; ++b) {
            const int m = 8 * b + lane % 8, piece = 4 * part + GroupSums::piece(lane);
            u32 r[4];
            load_matrix_x4(r, tile + m * (CHUNK * 2) + ((piece ^ (m % 8)) * 16));
            x[b][0][0] = r[0], x[b][0][1] = r[1], x[b][1][0] = r[2], x[b][1][1] = r[3];
        }
    }

    // Adds two k16 rows, each of which is a quantisation group.
    static __device__ __forceinline__ void add_groups_of_a_row(Sums& total, GroupSums& group_sums, const uint4* words,
                                                               const u16* scales, const u32 (&x)[BLOCKS_M][2][2], int lane) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const u16* row_scales = scales + FAULT_SITE(stream_row_scales, row * KINDS * 64);
            group_sums.begin(load_scales(row_scales, lane), load_zeros(row_scales, lane));
            LaneWords<Codec, 4> one;
            one.load(words + row * (Codec::TILE_BYTES / 16));
            group_sums.add_row(total, one, row, x);
        }
    }

    // The sums of block `block`, whose parts are in `parts`, of a tile that begins at row m0 and column n0, in shared memory:
    // store(buffer, m0, n0, rank) takes them, float [part][m][PITCH]. begin(m0, n0, rank, rows) comes before the product.
    template <typename Parts, typename Store, typename Begin = NothingFirst>
    static __device__ __forceinline__ void run(const u16* x, const uint4* words, const u16* scales, const u16* zeros, int M,
                                               int N, int K, i64 x_stride, int dependent, u32 block, const Parts& parts,
                                               Store store, Begin begin = Begin()) {
        extern __shared__ __align__(128) unsigned char shared[];

        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int wn = warp % WARPS_N, wk = warp / WARPS_N;
        const u32 rank = block % CLUSTER;
        const int tiles_m = (M + TILE_M - 1) / TILE_M;
        // Neighbouring blocks share a column tile, so that its weights are read from L2 after the first.
        const int tile = block / CLUSTER;
        // Most launches have one batch tile, and a division takes longer than a barrier.
        const int column_tile = tiles_m == 1 ? tile : tile / tiles_m;
        const int m0 = (tile - column_tile * tiles_m) * TILE_M, n0 = column_tile * TILE_N;
        const int rows_m = min(TILE_M, M - m0);

        constexpr u32 PARTS = Parts::COUNT;
        const u32 chunks = (K + CHUNK - 1) / CHUNK;
        u32 part = rank * WARPS_K + wk;
        const bool exists = parts.enter(part, x, words, scales, zeros);
        const int first = chunks * part / PARTS, my_steps = exists ? chunks * (part + 1) / PARTS - first : 0;
        const int steps = (chunks + PARTS - 1) / PARTS;

        // A warp past the last column repeats it; its results are not stored.
        const int n_tile = FAULT_SITE(stream_columns, min(n0 / 64 + wn, N / 64 - 1));
        const int last_group = QUANT_GROUP == 0 ? 0 : K / QUANT_GROUP - 1;

        const u32 ring = shared_address(shared);
        constexpr int TILE_VECTORS = Codec::TILE_BYTES / 16;
        const int row_vectors = N / 64 * TILE_VECTORS;
        const uint4* next_row = words + (i64)(first * ROWS) * row_vectors + n_tile * TILE_VECTORS + lane;
        int rows_left = K / Codec::ROW_CHANNELS - first * ROWS;
        const auto fetch_weights = [&](int step) {
            if (step >= my_steps) return;
            const u32 stage = ring + step % STAGES * STAGE_BYTES;
            const u32 mine = stage + warp * WEIGHT_BYTES + lane * 16;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int vector = 0; vector < TILE_VECTORS; vector += 32)
                    // Places, behind the planes, are a vector for every second lane.
                    if (vector + 32 <= TILE_VECTORS || lane < FAULT_SITE(stream_place_lanes, TILE_VECTORS % 32))
                        copy_async_16(mine + i * Codec::TILE_BYTES + vector * 16, next_row + vector, rows_left > i ? 16u : 0u);
                if (rows_left > i + 1) next_row += row_vectors;
            }
            rows_left -= ROWS;
            if (FAULT_SITE(stream_scales_once, QUANT_GROUP == 0 && step > 0)) return;
            const int first_group = QUANT_GROUP == 0 ? 0 : (first + step) * CHUNK / (QUANT_GROUP == 0 ? 1 : QUANT_GROUP);
#pragma unroll
            for (int base = 0; base < QUANT_GROUPS * KINDS * 8; base += 32) {
                const int index = base + lane, kind = index / 8 % KINDS;
                const int group = FAULT_SITE(stream_groups, min(first_group + index / 8 / KINDS, last_group));
                const u16* source = (kind == 0 ? scales : zeros) + (i64)group * N + n_tile * 64 + index % 8 * 8;
                const u32 at = QUANT_GROUP == 0 ? ring : stage;
                if (index < QUANT_GROUPS * KINDS * 8)
                    copy_async_16(at + SCALES_AT + warp * SCALE_BYTES + index * 16, source, 16u);
            }
        };
        const u16* my_x = x + (i64)m0 * x_stride + (i64)first * CHUNK;
        const auto fetch_activations = [&](int step) {
            if (step >= my_steps) return;
            const u32 mine = ring + step % STAGES * STAGE_BYTES + ACTIVATIONS_AT + wk * ACTIVATION_BYTES;
            const int k = (first + step) * CHUNK;
#pragma unroll
            for (int base = 0; base < TILE_M * PIECES; base += 32 * WARPS_N) {
                const int index = base + wn * 32 + lane, m = index / PIECES, piece = index % PIECES;
                // Rows past the batch are not loaded: they reach only columns of the product that are not stored. Channels
                // past K become zeros, which cancel whatever the weights of those rows are.
                if (m < rows_m)
                    copy_async_16(mine + m * (CHUNK * 2) + ((piece ^ (m % 8)) * 16), my_x + m * x_stride + piece * 8,
                                  k + piece * 8 < K ? 16u : 0u);
            }
            my_x += CHUNK;
        };

        if (dependent) {
            fetch_weights(0);
            FAULT_SITE(stream_waits, wait_for_previous_kernel();)
        }
        for (int s = 0; s < STAGES - 1; ++s) {
            if (!dependent || s > 0) fetch_weights(s);
            fetch_activations(s);
            copy_async_commit();
        }
        begin(m0, n0, rank, rows_m);

        Sums total;
        total.clear();
        GroupSums group_sums;
        if (QUANT_GROUP == 0) group_sums.clear();
        DigitSums<Codec> digit_sums;
        digit_sums.clear();
        u32* digits = reinterpret_cast<u32*>(shared + DIGITS_AT + warp * DIGIT_BYTES);
        const u16* channel_scales = reinterpret_cast<const u16*>(shared + SCALES_AT + warp * SCALE_BYTES);

        for (int step = 0; step < steps; ++step) {
            copy_async_wait<FAULT_SITE(stream_copies_waited, STAGES - 2)>();
            // The warps of a part share its activations; a single warp shares nothing.
            if (WARPS_N == 1)
                FAULT_SITE(stream_warp_met, __syncwarp();)
            else
                FAULT_SITE(stream_neighbours_met, barrier_sync(1 + wk, 32 * WARPS_N);)
            fetch_weights(step + STAGES - 1);
            fetch_activations(step + STAGES - 1);
            copy_async_commit();
            if (step == max(0, steps - STAGES)) launch_dependents();
            if (step >= my_steps) continue;

            const u32 stage = step % STAGES * STAGE_BYTES;
            const unsigned char* my_tile = shared + stage + warp * WEIGHT_BYTES;
            const uint4* my_weights = reinterpret_cast<const uint4*>(my_tile) + lane;
            const unsigned char* my_words = my_tile + LaneWords<Codec, 4>::words_offset(0, lane);
            const unsigned char* my_places = my_tile + LaneWords<Codec, 4>::places_offset(0, lane);
            const u32 activations = stage + ACTIVATIONS_AT + wk * ACTIVATION_BYTES;
            const u16* my_scales = channel_scales + (QUANT_GROUP == 0 ? 0 : stage / 2);
            if constexpr (DIGITS) {
                digit_sums.template add<QUANT_GROUP_ROWS>(
                    reinterpret_cast<const u16*>(shared + activations), my_weights, digits, lane,
                    [&](int g) { return load_scales(my_scales + g * KINDS * 64, lane); },
                    [&](int g) { return ZEROS ? load_zeros(my_scales + g * KINDS * 64, lane) : midpoints(); });
                continue;
            }
#pragma unroll
            for (int i = 0; i < ROWS; i += STEP) {
                u32 fragments[BLOCKS_M][2][2];
                FAULT_SITE(stream_activations, load_activations(fragments, ring + activations, i / STEP, lane);)
                const u16* group_scales = my_scales + i / QUANT_GROUP_ROWS * KINDS * 64;
                if constexpr (QUANT_GROUP_ROWS < STEP) {
                    add_groups_of_a_row(total, group_sums, my_weights + i * (Codec::TILE_BYTES / 16), group_scales, fragments, lane);
                    continue;
                }
                if (i % QUANT_GROUP_ROWS == 0) {
                    if (QUANT_GROUP != 0) group_sums.clear();
                    group_sums.begin(load_scales(group_scales, lane), load_zeros(group_scales, lane));
                }
                LaneWords<Codec, 4> some[STEP];
#pragma unroll
                for (int row = 0; row < STEP; ++row)
                    some[row].load(my_words + (i + row) * Codec::TILE_BYTES, my_places + (i + row) * Codec::TILE_BYTES);
                group_sums.add(total, some, fragments);
                if (QUANT_GROUP != 0 && i % QUANT_GROUP_ROWS == QUANT_GROUP_ROWS - STEP)
                    group_sums.close(total, load_scales(group_scales, lane), load_zeros(group_scales, lane));
            }
        }
        // A part without a chunk has loaded no scales: its memory may hold NaN, which must not be multiplied with its sums of zero.
        if (!DIGITS && QUANT_GROUP == 0 && my_steps > 0)
            group_sums.close(total, load_scales(channel_scales, lane), load_zeros(channel_scales, lane));

        // The ring is drained; its memory becomes the reduction buffer [part][m][n].
        copy_async_wait<0>();
        __syncthreads();
        float* buffer = FAULT_SITE(stream_sums, reinterpret_cast<float*>(shared));
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            if constexpr (DIGITS) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float sum = digit_sums.sum(q, h, lane);
                    if (lane % 4 == q) buffer[wk * PITCH + 64 * wn + 16 * q + lane / 4 + 8 * h] = sum;
                }
                continue;
            }
#pragma unroll
            for (int c = 0; c < BLOCKS_M; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int m = 8 * c + 2 * (lane % 4) + i % 2, n = 64 * wn + 16 * q + lane / 4 + 8 * (i / 2);
                    buffer[(wk * TILE_M + m) * PITCH + n] = total.value[q][c][i];
                }
        }
        store(buffer, m0, n0, rank);
    }

    static __device__ __forceinline__ void run(const u16* __restrict__ x, const uint4* __restrict__ words,
                                               const u16* __restrict__ scales, const u16* __restrict__ zeros,
                                               const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,
                                               i64 x_stride, i64 out_stride, int dependent) {
        run(x, words, scales, zeros, M, N, K, x_stride, dependent, blockIdx.x, EvenParts<CLUSTER * WARPS_K>(),
            [&](const float* buffer, int m0, int n0, u32 rank) {
                reduce_and_store<E, C::PAIR_ACTIVATION, TILE_M, TILE_N, PITCH, WARPS_K, CLUSTER, THREADS>(
                    buffer, bias, out, out_stride, m0, n0, M, N, rank, [] { __syncthreads(); });
            });
    }
};

#define INSTANTIATE_W4A16_STREAM(NAME, CONFIGURATION)                                                               \
    extern "C" __global__ void __launch_bounds__(StreamGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)     \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                              \
    NAME(const u16* __restrict__ x, const uint4* __restrict__ words, const u16* __restrict__ scales,                \
         const u16* __restrict__ zeros, const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,   \
         i64 x_stride, i64 out_stride, int dependent) {                                                             \
        StreamGemm<CONFIGURATION>::run(x, words, scales, zeros, bias, out, M, N, K, x_stride, out_stride, dependent); \
    }
