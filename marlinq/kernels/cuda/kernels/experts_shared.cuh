// A routed layer for a few rows in two launches, as kernels/experts_stream.cuh, where rows share experts: up to eight pairs of
// an expert take its weights together, as the columns of one product.
//
//   GATED   a group is up to eight pairs of one expert; every group is a product of its own, with gate and up:
//           inner[pair, j] = weights[pair] * activation(gate[j]) * up[j]
//   else    eight rows of the batch are a product with the down weights of all experts that any of them chose, one below the
//           other; a row's activations are zeros where it did not choose the expert:
//           out[m, n] = sum_e sum_j inner[pair(m, e), j] * down[e][j, n]
//           So an expert is read once, and the sum over the experts is the one over K.
//
// Which pairs belong together every block finds out by itself, comparing all pairs' experts: no sorting, and no launch for it.
// Groups are numbered in the order of their first pairs, so the result has the same bits every time.
//
//   pairs' experts -> groups of up to eight -> segments: an expert, and the pair of each of eight columns (or none)
//
// K of a block's product is that of its segments, one behind the other, in chunks; parts of K share the chunks evenly. The loop
// over them is that of kernels/stream.cuh with scaled sums, whose parts it is made of.
//
// Configuration: that of kernels/stream.cuh (one block of batch rows, SCALE_SUMS, no DIGITS), GATED, ACTIVATION, WIDE (64-bit
// ids), SLOTS (T), SEGMENT_BYTES (the host's count of the segments' bytes).
#pragma once
#include "kernels/experts_stream.cuh"
#include "ptx/vote.cuh"

template <typename C>
struct ExpertsShared {
    typedef StreamGemm<C> Gemm;
    typedef typename Gemm::E E;
    typedef typename ExpertsStream<C>::Router Router;
    typedef typename ExpertsStream<C>::Weights Weights;
    static constexpr int CLUSTER = Gemm::CLUSTER, WARPS_N = Gemm::WARPS_N, WARPS_K = Gemm::WARPS_K, PARTS = CLUSTER * WARPS_K;
    static constexpr int WARPS = Gemm::WARPS, THREADS = Gemm::THREADS, TILE_N = Gemm::TILE_N, PITCH = Gemm::PITCH;
    static constexpr int ROWS = Gemm::ROWS, CHUNK = Gemm::CHUNK, PIECES = Gemm::PIECES, STAGES = Gemm::STAGES;
    static constexpr int QUANT_GROUP = Gemm::QUANT_GROUP, QUANT_GROUPS = Gemm::QUANT_GROUPS, KINDS = Gemm::KINDS;
    static constexpr int SLOTS = C::SLOTS, COLUMNS = 8, PAIRS = 256;
    static constexpr bool GATED = C::GATED, ZEROS = Gemm::ZEROS;
    static_assert(Gemm::TILE_M == COLUMNS && Gemm::SCALE_SUMS && !Gemm::DIGITS, "eight pairs are a product's columns");

    static constexpr int SEGMENTS = GATED ? 1 : COLUMNS * SLOTS;
    static_assert(SEGMENTS <= PAIRS, "the host sorts more pairs");

    // In shared memory behind the ring.
    struct Segments {
        int expert[SEGMENTS];
        short pair[SEGMENTS][COLUMNS];  // -1: none
    };
    static_assert(C::SEGMENT_BYTES == sizeof(Segments), "host and kernel count different bytes of segments");

    // What finds them, in the ring's memory before anything else is there.
    struct Scratch {
        int expert[PAIRS];
        int key[PAIRS];     // the same for pairs that may share a group; -1: none
        int leader[PAIRS];  // the first pair of the group, and the pair's number in it from bit 16 on
        u32 leads[PAIRS / 32];
    };
    static_assert(sizeof(Scratch) <= Gemm::RING_BYTES, "pairs are compared in the ring's memory");

    // Finds the groups of pairs first .. first + count - 1 and returns how many there are. GATED keeps group unit % groups,
    // otherwise all are kept, in which a pair's column is that of its row.
    static __device__ __forceinline__ int find(Segments& segments, Scratch& scratch, const Router& router, i64 first, int count,
                                               int unit) {
        const int thread = threadIdx.x, lane = thread % 32;
        for (int t = thread; t < PAIRS && t < (count + 3) / 4 * 4; t += THREADS)
            scratch.expert[t] = t < count ? router.expert(first + t) : -1;
        for (int i = thread; i < SEGMENTS * COLUMNS; i += THREADS) segments.pair[i / COLUMNS][i % COLUMNS] = -1;
        __syncthreads();
        // A row that names an expert twice has it in two groups: columns are rows.
        for (int t = thread; t < (count + 3) / 4 * 4; t += THREADS) {
            const int expert = scratch.expert[t];
            bool again = false;
            if (!GATED)
                for (int s = t % SLOTS; s > 0; --s) again |= scratch.expert[t - s] == expert;
            scratch.key[t] = again && expert >= 0 ? -2 - t : expert;
        }
        __syncthreads();
        const int runs = (count + 31) / 32;
        for (int run = thread / 32; run < runs; run += WARPS) {
            const int t = 32 * run + lane, mine = t < count ? scratch.key[t] : -1;
            int same = 0, leader = t;
            for (int j = 0; j < t && j < count; j += 4) {
                const int4 four = *reinterpret_cast<const int4*>(scratch.key + j);
                const int keys[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (j + i < t && keys[i] == mine) {
                        if (same % COLUMNS == 0) leader = j + i;
                        ++same;
                    }
            }
            if (same % COLUMNS == 0) leader = t;
            const bool leads = mine != -1 && leader == t;
            const u32 alike = lanes_with_same(leads);
            if (lane == 0) scratch.leads[run] = leads ? alike : ~alike;
            scratch.leader[t] = mine == -1 ? -1 : leader | same % COLUMNS << 16;
        }
        __syncthreads();
        int groups = 0;
        for (int run = 0; run < runs; ++run) groups += count_bits(scratch.leads[run]);
        const int wanted = GATED ? unit % max(groups, 1) : 0;
        for (int t = thread; t < count; t += THREADS) {
            const int found = scratch.leader[t];
            if (found < 0) continue;
            const int leader = found % 65536;
            int group = count_bits(scratch.leads[leader / 32] & ((1u << leader % 32) - 1));
            for (int run = 0; run < leader / 32; ++run) group += count_bits(scratch.leads[run]);
            if (GATED && group != wanted) continue;
            const int segment = GATED ? 0 : group;
            segments.pair[segment][GATED ? found / 65536 : t / SLOTS] = (short)t;
            if (leader == t) segments.expert[segment] = scratch.expert[t];
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

        struct Place {
            int segment, chunk;
        };
        const auto advance = [&](Place& at) {
            if (++at.chunk == of_segment) at.chunk = 0, ++at.segment;
        };
        Place next_weights{first / of_segment, first % of_segment}, next_activations = next_weights;

        const auto fetch_weights = [&](int step) {
            if (step >= my_steps) return;
            const Place at = next_weights;
            const int expert = segments.expert[at.segment], rows = K / 16 - at.chunk * ROWS;
            const u32 stage = ring + step % STAGES * Gemm::STAGE_BYTES, mine = stage + warp * Gemm::WEIGHT_BYTES + lane * 16;
            const uint4* row = weights.words + expert * weights.vectors() + (i64)(at.chunk * ROWS) * (N / 2) + n_tile * 32 + lane;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                copy_async_16(mine + i * 512, row, rows > i ? 16u : 0u);
                if (rows > i + 1) row += N / 2;
            }
            const int first_group = QUANT_GROUP == 0 ? 0 : at.chunk * CHUNK / (QUANT_GROUP == 0 ? 1 : QUANT_GROUP);
            const int last_group = QUANT_GROUP == 0 ? 0 : K / (QUANT_GROUP == 0 ? 1 : QUANT_GROUP) - 1;
#pragma unroll
            for (int base = 0; base < QUANT_GROUPS * KINDS * 8; base += 32) {
                const int index = base + lane, kind = index / 8 % KINDS;
                const int group = min(first_group + index / 8 / KINDS, last_group);
                const u16* source = (kind == 0 ? weights.scales : weights.zeros) + expert * weights.numbers() + (i64)group * N +
                                    n_tile * 64 + index % 8 * 8;
                if (index < QUANT_GROUPS * KINDS * 8)
                    copy_async_16(stage + Gemm::SCALES_AT + warp * Gemm::SCALE_BYTES + index * 16, source, 16u);
            }
            advance(next_weights);
        };
        const auto fetch_activations = [&](int step) {
            if (step >= my_steps) return;
            const Place at = next_activations;
            const u32 mine = ring + step % STAGES * Gemm::STAGE_BYTES + Gemm::ACTIVATIONS_AT + wk * Gemm::ACTIVATION_BYTES;
#pragma unroll
            for (int base = 0; base < COLUMNS * PIECES; base += 32 * WARPS_N) {
                const int index = base + wn * 32 + lane, m = index / PIECES, piece = index % PIECES;
                if (COLUMNS * PIECES % (32 * WARPS_N) != 0 && m >= COLUMNS) continue;
                const int pair = segments.pair[at.segment][m], k = at.chunk * CHUNK + piece * 8;
                // Columns without a pair, and channels past K, are zeros: they must add nothing.
                const bool exists = pair >= 0 && k < K;
                const u16* source = exists ? x + (GATED ? pair / SLOTS : pair) * x_stride + k : x;
                copy_async_16(mine + m * (CHUNK * 2) + ((piece ^ (m % 8)) * 16), source, exists ? 16u : 0u);
            }
            advance(next_activations);
        };

        if (dependent) {
            fetch_weights(0);
            wait_for_previous_kernel();
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

            const u32 stage = step % STAGES * Gemm::STAGE_BYTES;
            const uint4* my_weights = reinterpret_cast<const uint4*>(shared + stage + warp * Gemm::WEIGHT_BYTES) + lane;
            const u32 activations = ring + stage + Gemm::ACTIVATIONS_AT + wk * Gemm::ACTIVATION_BYTES;
            const u16* scales =
                reinterpret_cast<const u16*>(shared + stage + Gemm::SCALES_AT + warp * Gemm::SCALE_BYTES);
            // A single group ends with every chunk, for the next may be another expert's.
#pragma unroll
            for (int i = 0; i < ROWS; i += 2) {
                u32 fragments[1][2][2];
                Gemm::load_activations(fragments, activations, i, lane);
                const u16* of_group = scales + i / Gemm::QUANT_GROUP_ROWS * KINDS * 64;
                if (i % Gemm::QUANT_GROUP_ROWS == 0) {
                    group_sums.clear();
                    group_sums.begin(Gemm::load_scales(of_group, lane), Gemm::load_zeros(of_group, lane));
                }
                group_sums.add(total, my_weights[i * 32], my_weights[(i + 1) * 32], fragments);
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
                buffer[(wk * COLUMNS + m) * PITCH + n] = total.value[q][0][i];
            }
        return buffer;
    }

    static __device__ __forceinline__ void gate_up(const u16* x, const Weights& weights, const Router& router,
                                                   const float* routing, u16* inner, int M, i64 x_stride, int dependent) {
        extern __shared__ __align__(128) unsigned char shared[];
        Segments& segments = *reinterpret_cast<Segments*>(shared + Gemm::SHARED_BYTES);
        Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
        if (dependent) wait_for_previous_kernel();
        const int unit = blockIdx.x / CLUSTER, groups = find(segments, scratch, router, 0, M * SLOTS, unit);
        // The grid has blocks for as many groups as there may be; those that exist are the first.
        if (groups == 0) return;
        const int tile = unit / groups, n0 = tile * TILE_N;
        if (n0 >= weights.N) return;
        const u32 rank = blockIdx.x % CLUSTER;
        const float* buffer = multiply(segments, 1, x, x_stride, weights, tile, rank, 0);
        if constexpr (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        // Blocks of 16 columns take turns: gate, up.
        for (int four = rank * THREADS + threadIdx.x; four < COLUMNS * (TILE_N / 8); four += CLUSTER * THREADS) {
            const int m = four / (TILE_N / 8), j = four % (TILE_N / 8) * 4, n = j / 16 * 32 + j % 16;
            const int pair = segments.pair[0][m];
            if (pair < 0 || n0 + n >= weights.N) continue;
            const float4 gate = add_parts<COLUMNS, PITCH, WARPS_K, CLUSTER>(buffer, m, n);
            const float4 up = add_parts<COLUMNS, PITCH, WARPS_K, CLUSTER>(buffer, m, n + 16);
            const float weight = routing[pair];
            store_global(inner + (i64)pair * (weights.N / 2) + n0 / 2 + j,
                         make_uint2(E::narrow(activation<C::ACTIVATION>(gate.x) * up.x * weight,
                                              activation<C::ACTIVATION>(gate.y) * up.y * weight),
                                    E::narrow(activation<C::ACTIVATION>(gate.z) * up.z * weight,
                                              activation<C::ACTIVATION>(gate.w) * up.w * weight)));
        }
        // A block stays until its shared memory has been read.
        if constexpr (CLUSTER > 1) {
            cluster_arrive_relaxed();
            cluster_wait();
        }
    }

    // Ids are older than the previous kernel, which waited for them, so weights are requested before that has ended.
    static __device__ __forceinline__ void down(const u16* inner, const Weights& weights, const Router& router, u16* out, int M,
                                                int dependent) {
        extern __shared__ __align__(128) unsigned char shared[];
        Segments& segments = *reinterpret_cast<Segments*>(shared + Gemm::SHARED_BYTES);
        Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
        const int tiles_m = (M + COLUMNS - 1) / COLUMNS, unit = blockIdx.x / CLUSTER, tile = unit / tiles_m;
        const int m0 = (unit - tile * tiles_m) * COLUMNS, rows = min(COLUMNS, M - m0);
        const i64 first = (i64)m0 * SLOTS;
        const int groups = find(segments, scratch, router, first, rows * SLOTS, 0);
        const u32 rank = blockIdx.x % CLUSTER;
        const float* buffer = multiply(segments, groups, inner + first * weights.K, weights.K, weights, tile, rank, dependent);
        reduce_and_store<E, Activation::NONE, COLUMNS, TILE_N, PITCH, WARPS_K, CLUSTER, THREADS>(
            buffer, nullptr, out, weights.N, m0, tile * TILE_N, M, weights.N, rank, [] { __syncthreads(); });
    }
};

#define INSTANTIATE_EXPERTS_SHARED(NAME, CONFIGURATION)                                                                      \
    extern "C" __global__ void __launch_bounds__(StreamGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)              \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                                       \
    NAME(const u16* x, const uint4* words, const u16* scales, const u16* zeros, const int* ids, const int* map,              \
         const float* routing, u16* out, int M, int N, int K, int experts, int map_size, i64 x_stride, int dependent) {      \
        typedef ExpertsShared<CONFIGURATION> Layer;                                                                          \
        const typename Layer::Weights weights{words, scales, zeros, N, K};                                                   \
        const typename Layer::Router router{ids, map, map_size, experts};                                                    \
        if constexpr (CONFIGURATION::GATED)                                                                                  \
            Layer::gate_up(x, weights, router, routing, out, M, x_stride, dependent);                                        \
        else                                                                                                                 \
            Layer::down(x, weights, router, out, M, dependent);                                                              \
    }
