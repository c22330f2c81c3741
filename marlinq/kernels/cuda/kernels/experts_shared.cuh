// A routed layer for a few rows in two launches, as kernels/experts_stream.cuh, where rows share experts: up to COLUMNS
// pairs of an expert take its weights together, as the columns of one product.
//
//   GATED   a group is up to COLUMNS pairs of one expert; every group is a product of its own, with gate and up:
//           inner[pair, j] = weights[pair] * activation(gate[j]) * up[j]
//   else    COLUMNS rows of the batch are a product with the down weights of all experts that any of them chose, one below the
//           other; a row's activations are zeros where it did not choose the expert:
//           out[m, n] = sum_e sum_j inner[pair(m, e), j] * down[e][j, n]
//           So an expert is read once, and the sum over the experts is the one over K.
//
// Every block finds the groups by itself, by comparing the experts of all pairs, so that no launch has to sort them. Groups are
// numbered in the order of their first pairs, so the result has the same bits every time.
//
//   pairs' experts -> groups -> segments: an expert, and the pair of each column (or none)
//
// K of a block's product is that of its segments, one behind the other, in chunks; parts of K share the chunks evenly. The loop
// over them is that of kernels/stream.cuh with scaled sums, or scaled weights where a row is a quantisation group.
//
// Configuration: that of kernels/stream.cuh (one block of batch rows, SCALE_SUMS but for quantisation groups of 16, no DIGITS), COLUMNS (2, 4 or 8), GATED, BIASED, ACTIVATION, WIDE
// (64-bit ids), SLOTS (T), GROUPED_SHARED_BYTES (the host's count).
#pragma once
#include "fault_site.cuh"
#include "kernels/experts_stream.cuh"
#include "ptx/vote.cuh"

template <typename C>
struct ExpertsShared {
    typedef StreamGemm<C> Gemm;
    typedef typename Gemm::Codec Codec;
    typedef typename Gemm::E E;
    typedef ExpertsStream<C> Alone;  // operands and epilogues are the same as there
    typedef typename Alone::Router Router;
    typedef typename Alone::Weights Weights;
    static constexpr int CLUSTER = Gemm::CLUSTER, WARPS_N = Gemm::WARPS_N, WARPS_K = Gemm::WARPS_K, PARTS = CLUSTER * WARPS_K;
    static constexpr int WARPS = Gemm::WARPS, THREADS = Gemm::THREADS, TILE_N = Gemm::TILE_N, PITCH = Gemm::PITCH;
    static constexpr int ROWS = Gemm::ROWS, CHUNK = Gemm::CHUNK, PIECES = Gemm::PIECES, STAGES = Gemm::STAGES;
    static constexpr int QUANT_GROUP = Gemm::QUANT_GROUP, QUANT_GROUPS = Gemm::QUANT_GROUPS, KINDS = Gemm::KINDS;
    static constexpr int SLOTS = C::SLOTS, COLUMNS = C::COLUMNS, PAIRS = 256;
    static constexpr bool GATED = C::GATED, ZEROS = Gemm::ZEROS;
    static_assert(Gemm::BLOCKS_M == 1 && !Gemm::DIGITS, "columns are those of one mma");
    static_assert(Gemm::SCALE_SUMS != (Gemm::QUANT_GROUP_ROWS == 1), "sums of a quantisation group are scaled at its end");
    static_assert(COLUMNS <= 8 && 8 % COLUMNS == 0 && CHUNK == 128, "rows of activations are 16 pieces");

    // Bytes of a stage, by warp or part; as in kernels/stream.cuh, but for fewer rows of activations.
    static constexpr int ACTIVATION_BYTES = COLUMNS * CHUNK * 2;
    static constexpr int SCALES_AT = Gemm::ACTIVATIONS_AT + WARPS_K * ACTIVATION_BYTES;
    static constexpr int STAGE_BYTES = SCALES_AT + WARPS * Gemm::SCALE_BYTES;
    static constexpr int REDUCTION_BYTES = WARPS_K * COLUMNS * PITCH * 4;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES > REDUCTION_BYTES ? STAGES * STAGE_BYTES : REDUCTION_BYTES;

    static constexpr int SEGMENTS = GATED ? 1 : COLUMNS * SLOTS;
    static_assert(SEGMENTS <= PAIRS, "pairs of all rows are compared");

    // The segments, in shared memory behind the ring.
    struct Segments {
        int expert[SEGMENTS];
        short pair[SEGMENTS][COLUMNS];  // -1: none
    };
    static_assert(C::GROUPED_SHARED_BYTES == RING_BYTES + sizeof(Segments), "host and kernel count different bytes of shared memory");

    // Scratch memory to find the segments; it lies where the ring will be.
    struct Scratch {
        int expert[PAIRS];
        int key[PAIRS];   // the same for pairs that may share a group; -1: none
        int rank[PAIRS];  // number of earlier pairs with the same key; -1: none
        int first[PAIRS];  // first pair with the same key
        u32 leads[PAIRS / 32];  // bits of pairs that are the first of a group
        int base;               // rank of the first pair of the group that is kept
    };
    static_assert(sizeof(Scratch) <= RING_BYTES, "pairs are compared in the ring's memory");

    // Finds the groups of pairs first .. first + count - 1 and returns how many there are. GATED keeps group unit % groups,
    // otherwise all are kept, in which a pair's column is that of its row.
    static __device__ __forceinline__ int find(Segments& segments, Scratch& scratch, const Router& router, i64 first, int count,
                                               int unit) {
        const int thread = threadIdx.x, lane = thread % 32, padded = (count + 3) / 4 * 4;
        int* const keys = GATED ? scratch.expert : scratch.key;
        for (int t = thread; t < padded; t += THREADS) scratch.expert[t] = t < count ? router.expert(first + t) : -1;
        for (int i = thread; i < SEGMENTS * COLUMNS; i += THREADS) segments.pair[i / COLUMNS][i % COLUMNS] = -1;
        __syncthreads();
        if constexpr (!GATED) {
            // A row that names an expert twice is in two groups of it, since a group has one column for each row.
            for (int t = thread; t < padded; t += THREADS) {
                const int expert = scratch.expert[t];
                bool again = false;
                for (int s = t % SLOTS; s > 0; --s) again |= scratch.expert[t - s] == expert;
                keys[t] = FAULT_SITE(expert_again, again && expert >= 0 ? -2 - t : expert);
            }
            __syncthreads();
        }
        const int runs = (count + 31) / 32;
        for (int run = thread / 32; run < runs; run += WARPS) {
            const int t = 32 * run + lane, mine = t < count ? keys[t] : -1, before = min(padded, 32 * run + 32);
            int same[4] = {0, 0, 0, 0}, earliest = t;
#pragma unroll 4
            for (int j = 0; j < before; j += 4) {
                const int4 four = *reinterpret_cast<const int4*>(keys + j);
                const int theirs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool equal = theirs[i] == mine && j + i < t;
                    same[i] += equal;
                    if (!GATED && equal) earliest = min(earliest, j + i);
                }
            }
            const int rank = same[0] + same[1] + same[2] + same[3];
            const bool leads = mine != -1 && rank % COLUMNS == 0;
            const u32 alike = lanes_with_same(leads);
            if (lane == 0) scratch.leads[run] = leads ? alike : ~alike;
            scratch.rank[t] = mine == -1 ? -1 : rank;
            if (!GATED) scratch.first[t] = earliest;
        }
        FAULT_SITE(pairs_compared, __syncthreads();)
        int groups = 0;
        for (int run = 0; run < runs; ++run) groups += count_bits(scratch.leads[run]);
        if (groups == 0) return 0;
        const auto number = [&](int t) {
            int group = count_bits(scratch.leads[t / 32] & ((1u << t % 32) - 1));
            for (int run = 0; run < t / 32; ++run) group += count_bits(scratch.leads[run]);
            return group;
        };
        if constexpr (GATED) {
            const int wanted = unit % groups;
            for (int t = thread; t < count; t += THREADS) {
                const int rank = scratch.rank[t];
                if (rank < 0 || rank % COLUMNS != 0 || number(t) != wanted) continue;
                segments.expert[0] = keys[t], scratch.base = rank;
            }
            __syncthreads();
            for (int t = thread; t < count; t += THREADS) {
                const int column = scratch.rank[t] - scratch.base;
                if (keys[t] == segments.expert[0] && column >= 0 && column < COLUMNS) segments.pair[0][column] = (short)t;
            }
        } else {
            for (int t = thread; t < count; t += THREADS) {
                if (scratch.rank[t] < 0) continue;
                const int leader = scratch.first[t], segment = number(leader);
                segments.pair[segment][t / SLOTS] = (short)t;
                if (leader == t) segments.expert[segment] = scratch.expert[t];
            }
        }
        __syncthreads();
        return groups;
    }

    // The sums over the chunks of the first `count` segments: float [part][column][PITCH] in shared memory. Row p of x is that of
    // pair p, or of the batch's row p / SLOTS if GATED.
    static __device__ __forceinline__ const float* multiply(const Segments& segments, int count, const u16* x, i64 x_stride,
                                                            const Weights& weights, int column_tile, u32 rank, int dependent) {
        extern __shared__ __align__(128) unsigned char shared[];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wn = warp % WARPS_N, wk = warp / WARPS_N;
        const int N = weights.N, K = weights.K, n_tile = min(column_tile * WARPS_N + wn, N / 64 - 1);
        const int of_segment = (K + CHUNK - 1) / CHUNK, chunks = count * of_segment, part = rank * WARPS_K + wk;
        const int first = chunks * part / PARTS, my_steps = chunks * (part + 1) / PARTS - first;
        const int steps = (chunks + PARTS - 1) / PARTS;
        const u32 ring = shared_address(shared);

        // Pointers to the operands of the next chunk, recomputed when a segment begins.
        const int last_group = QUANT_GROUP == 0 ? 0 : K / (QUANT_GROUP == 0 ? 1 : QUANT_GROUP) - 1;
        const int row_vectors = N / 2 * Codec::PLANES;
        const uint4* row = nullptr;
        const u16 *scales = nullptr, *zeros = nullptr;
        int weights_segment = first / of_segment, weights_chunk = first % of_segment;
        const auto enter_weights = [&]() {
            const i64 expert = segments.expert[weights_segment];
            row = weights.words + weights.words_of(expert) + (i64)(weights_chunk * ROWS) * row_vectors +
                  n_tile * (32 * Codec::PLANES) + lane;
            scales = weights.scales + weights.scales_of(expert) + n_tile * 64 + lane % 8 * 8;
            zeros = weights.zeros + weights.zeros_of(expert) + n_tile * 64 + lane % 8 * 8;
        };
        const auto fetch_weights = [&](int step) {
            if (step >= my_steps) return;
            const u32 stage = ring + step % STAGES * STAGE_BYTES, mine = stage + warp * Gemm::WEIGHT_BYTES + lane * 16;
            const int rows = K / 16 - weights_chunk * ROWS;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int plane = 0; plane < Codec::PLANES; ++plane)
                    copy_async_16(mine + i * Codec::TILE_BYTES + plane * 512, row + plane * 32,
                                  rows > i ? 16u : 0u);
                if (rows > i + 1) row += row_vectors;
            }
            const int first_group = QUANT_GROUP == 0 ? 0 : weights_chunk * CHUNK / (QUANT_GROUP == 0 ? 1 : QUANT_GROUP);
#pragma unroll
            for (int base = 0; base < QUANT_GROUPS * KINDS * 8; base += 32) {
                const int index = base + lane, kind = index / 8 % KINDS;
                const int group = min(first_group + index / 8 / KINDS, last_group);
                if (index < QUANT_GROUPS * KINDS * 8)
                    copy_async_16(stage + SCALES_AT + warp * Gemm::SCALE_BYTES + index * 16,
                                  (kind == 0 ? scales : zeros) + (i64)group * N, 16u);
            }
            FAULT_SITE(next_segment, if (++weights_chunk == of_segment && step + 1 < my_steps) weights_chunk = 0, ++weights_segment, enter_weights();)
        };

        // A lane copies the same 16 bytes of every row that it has.
        constexpr int AT_ONCE = 32 * WARPS_N / PIECES, TURNS = (COLUMNS + AT_ONCE - 1) / AT_ONCE;
        const int piece = lane % PIECES, my_column = (wn * 32 + lane) / PIECES;
        i64 rows_of_x[TURNS];  // where they begin; -1: zeros
        int x_segment = weights_segment, x_chunk = weights_chunk;
        const auto enter_activations = [&]() {
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int column = my_column + i * AT_ONCE, pair = column < COLUMNS ? segments.pair[x_segment][column] : -1;
                rows_of_x[i] = pair < 0 ? FAULT_SITE(empty_column, -1) : (GATED ? pair / SLOTS : pair) * x_stride;
            }
        };
        const auto fetch_activations = [&](int step) {
            if (step >= my_steps) return;
            const u32 mine = ring + step % STAGES * STAGE_BYTES + Gemm::ACTIVATIONS_AT + wk * ACTIVATION_BYTES;
            const int k = x_chunk * CHUNK + piece * 8;
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int column = my_column + i * AT_ONCE;
                // Columns without a pair, and channels past K, are zeros: they must add nothing.
                const bool exists = rows_of_x[i] >= 0 && k < K;
                if (column < COLUMNS)
                    copy_async_16(mine + column * (CHUNK * 2) + ((piece ^ column) * 16), exists ? x + rows_of_x[i] + k : x,
                                  exists ? 16u : 0u);
            }
            if (++x_chunk == of_segment && step + 1 < my_steps) x_chunk = 0, ++x_segment, enter_activations();
        };

        if (my_steps > 0) enter_weights(), enter_activations();
        if (dependent) {
            fetch_weights(0);
            FAULT_SITE(shared_activations_wait, wait_for_previous_kernel();)
        }
        for (int s = 0; s < STAGES - 1; ++s) {
            if (!dependent || s > 0) fetch_weights(s);
            fetch_activations(s);
            copy_async_commit();
        }

        typename Gemm::Sums total;
        total.clear();
        typename Gemm::GroupSums group_sums;
        for (int step = 0; step < steps; ++step) {
            copy_async_wait<STAGES - 2>();
            if (WARPS_N == 1)
                __syncwarp();
            else
                barrier_sync(1 + wk, 32 * WARPS_N);
            fetch_weights(step + STAGES - 1);
            fetch_activations(step + STAGES - 1);
            copy_async_commit();
            if (step == max(0, steps - STAGES)) launch_dependents();
            if (step >= my_steps) continue;

            const u32 stage = step % STAGES * STAGE_BYTES;
            const uint4* my_weights = reinterpret_cast<const uint4*>(shared + stage + warp * Gemm::WEIGHT_BYTES) + lane;
            const u32 activations = ring + stage + Gemm::ACTIVATIONS_AT + wk * ACTIVATION_BYTES;
            const u16* my_scales = reinterpret_cast<const u16*>(shared + stage + SCALES_AT + warp * Gemm::SCALE_BYTES);
            // With one scale per channel, sums are scaled after every chunk, since the next chunk may be another expert's.
#pragma unroll
            for (int i = 0; i < ROWS; i += 2) {
                u32 fragments[1][2][2];
                // Missing columns repeat existing ones; their results are not stored.
                const int column = lane % COLUMNS, at = 2 * i + Gemm::GroupSums::piece(lane);
                u32 matrices[4];
                load_matrix_x4(matrices, activations + column * (CHUNK * 2) + ((at ^ column) * 16));
                fragments[0][0][0] = matrices[0], fragments[0][0][1] = matrices[1];
                fragments[0][1][0] = matrices[2], fragments[0][1][1] = matrices[3];
                const u16* of_group = my_scales + i / Gemm::QUANT_GROUP_ROWS * KINDS * 64;
                if constexpr (Gemm::QUANT_GROUP_ROWS == 1) {
                    Gemm::add_groups_of_a_row(total, group_sums, my_weights + i * (Codec::TILE_BYTES / 16), of_group, fragments, lane);
                    continue;
                }
                if (i % Gemm::QUANT_GROUP_ROWS == 0) {
                    group_sums.clear();
                    group_sums.begin(Gemm::load_scales(of_group, lane), Gemm::load_zeros(of_group, lane));
                }
                LaneWords<Codec, 4> two[2];
                two[0].load(my_weights + i * (Codec::TILE_BYTES / 16));
                two[1].load(my_weights + (i + 1) * (Codec::TILE_BYTES / 16));
                group_sums.add(total, two, fragments);
                if (i % Gemm::QUANT_GROUP_ROWS == Gemm::QUANT_GROUP_ROWS - 2)
                    group_sums.close(total, Gemm::load_scales(of_group, lane), Gemm::load_zeros(of_group, lane));
            }
        }
        // The ring is drained; its memory becomes the reduction buffer [part][column][n].
        copy_async_wait<0>();
        __syncthreads();
        float* buffer = reinterpret_cast<float*>(shared);
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = 2 * (lane % 4) + i % 2, n = 64 * wn + 16 * q + lane / 4 + 8 * (i / 2);
                if (m < COLUMNS) buffer[(wk * COLUMNS + m) * PITCH + n] = total.value[q][0][i];
            }
        return buffer;
    }

    static __device__ __forceinline__ void gate_up(const u16* x, const Weights& weights, const Router& router,
                                                   const float* routing, u16* inner, int M, i64 x_stride, int dependent) {
        extern __shared__ __align__(128) unsigned char shared[];
        Segments& segments = *reinterpret_cast<Segments*>(shared + RING_BYTES);
        Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
        FAULT_SITE(shared_choice_waits, if (dependent) wait_for_previous_kernel();)
        const int unit = blockIdx.x / CLUSTER, groups = find(segments, scratch, router, 0, M * SLOTS, unit);
        // The grid has blocks for the largest possible number of groups; existing groups come first.
        if (groups == 0) return;
        const int tile = unit / groups, n0 = tile * TILE_N;
        if (n0 >= weights.N) return;
        const u32 rank = blockIdx.x % CLUSTER;
        const float* buffer = multiply(segments, 1, x, x_stride, weights, tile, rank, 0);
        Alone::template store_inner<COLUMNS>(
            buffer, COLUMNS, weights,
            [&](int column, i64& pair, int& expert, float& weight) {
                pair = segments.pair[0][column], expert = segments.expert[0];
                if (pair < 0) return false;
                weight = routing[pair];
                return true;
            },
            inner, n0, rank);
    }

    // Ids were written before the previous kernel began, so weights are requested without waiting for that kernel.
    static __device__ __forceinline__ void down(const u16* inner, const Weights& weights, const Router& router,
                                                const float* routing, u16* out, int M, int dependent) {
        extern __shared__ __align__(128) unsigned char shared[];
        Segments& segments = *reinterpret_cast<Segments*>(shared + RING_BYTES);
        Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
        const int tiles_m = (M + COLUMNS - 1) / COLUMNS, unit = blockIdx.x / CLUSTER, tile = unit / tiles_m;
        const int m0 = (unit - tile * tiles_m) * COLUMNS, rows = min(COLUMNS, M - m0);
        const i64 first = (i64)m0 * SLOTS;
        const int groups = find(segments, scratch, router, first, rows * SLOTS, 0);
        const u32 rank = blockIdx.x % CLUSTER;
        const float* buffer = multiply(segments, groups, inner + first * weights.K, weights.K, weights, tile, rank, dependent);
        Alone::template store_rows<COLUMNS>(buffer, weights, router, routing, first, out, m0, rows, tile * TILE_N, rank);
    }
};

#define INSTANTIATE_EXPERTS_SHARED(NAME, CONFIGURATION)                                                                      \
    extern "C" __global__ void __launch_bounds__(StreamGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)              \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                                       \
    NAME(const u16* x, const uint4* words, const u16* scales, const u16* zeros, const u16* bias, const int* ids,             \
         const int* map, const float* routing, u16* out, int M, int N, int K, int experts, int map_size, i64 x_stride,       \
         int dependent, int own, i64 words_apart, i64 scales_apart, i64 zeros_apart) {                                       \
        typedef ExpertsShared<CONFIGURATION> Layer;                                                                          \
        const typename Layer::Weights weights{words, scales, zeros, bias, N, K, own, words_apart, scales_apart, zeros_apart}; \
        const typename Layer::Router router{ids, map, map_size, experts};                                                    \
        if constexpr (CONFIGURATION::GATED)                                                                                  \
            Layer::gate_up(x, weights, router, routing, out, M, x_stride, dependent);                                        \
        else                                                                                                                 \
            Layer::down(x, weights, router, routing, out, M, dependent);                                                     \
    }
