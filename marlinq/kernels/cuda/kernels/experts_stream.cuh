// A routed layer for a few rows in two launches, built on the stream kernel (kernels/stream.cuh): no sorting, no gathering and no
// sum of their own.
//
//   GATED   every pair (row of the batch, slot) is a product of its own, of one row with the gate and up of its expert:
//           inner[pair, j] = weights[pair] * activation(gate[j]) * up[j]
//           BIASED adds biases to gate and up.
//   else    every row of the batch is a product with the down weights of its T experts, one below the other:
//           out[m, n] = sum_s sum_j inner[m T + s, j] * down[ids[m, s]][j, n]
//           The parts of K, warps and blocks of a cluster, are dealt to the slots. So the sum over the slots is the
//           reduction of split-K, in a fixed order. BIASED adds weights[m, s] * bias[ids[m, s]].
//
// Pairs, or rows, that share columns are neighbours in the grid: weights that they share come from L2 after the first.
// A pair whose expert is on another GPU is skipped.
//
// Experts from number `own` on lie in other memory: a shared expert, stored as further experts, that every row takes (`further` in
// kernels/experts/steps.py).
//
// Configuration: that of kernels/stream.cuh, FURTHER (whether there are such experts; else `own` is ignored), GATED, BIASED, ACTIVATION,
// WIDE (64-bit ids), SLOTS (T; parts are a multiple of it).
#pragma once
#include "fault_site.cuh"
#include "experts/records.cuh"
#include "kernels/stream.cuh"
#include "step/activate.cuh"

template <typename C>
struct ExpertsStream {
    typedef StreamGemm<C> Gemm;
    typedef typename Gemm::E E;
    static constexpr int CLUSTER = Gemm::CLUSTER, WARPS_K = Gemm::WARPS_K, TILE_M = Gemm::TILE_M, TILE_N = Gemm::TILE_N;
    static constexpr int PITCH = Gemm::PITCH, THREADS = Gemm::THREADS, SLOTS = C::SLOTS, PARTS = CLUSTER * WARPS_K;

    struct Router {
        const int *ids, *map;
        int map_size, experts;

        __device__ __forceinline__ int expert(i64 pair) const { return local_expert<C::WIDE>(ids, pair, map, map_size, experts); }
    };

    // Pointers to an expert's weights.
    struct Weights {
        const uint4* words;
        const u16 *scales, *zeros, *bias;  // bias [E, N]
        int N, K, own;
        i64 words_apart, scales_apart, zeros_apart;  // added to the offsets of experts from `own` on

        __device__ __forceinline__ i64 vectors() const { return (i64)(K / 16) * (N / 2 * Gemm::Codec::PLANES); }
        __device__ __forceinline__ i64 numbers() const {
            return (i64)(Gemm::QUANT_GROUP == 0 ? 1 : K / (Gemm::QUANT_GROUP == 0 ? 1 : Gemm::QUANT_GROUP)) * N;
        }
        // Offsets of an expert's words, scales and zero points from those of expert 0.
        __device__ __forceinline__ i64 words_of(i64 expert) const { return expert * vectors() + moved(expert, words_apart); }
        __device__ __forceinline__ i64 scales_of(i64 expert) const { return expert * numbers() + moved(expert, scales_apart); }
        __device__ __forceinline__ i64 zeros_of(i64 expert) const { return expert * numbers() + moved(expert, zeros_apart); }
        __device__ __forceinline__ i64 moved(i64 expert, i64 apart) const { return C::FURTHER && expert >= own ? apart : 0; }
    };

    // Parts that are dealt to the slots of a row.
    struct SlotParts {
        static constexpr u32 COUNT = PARTS / SLOTS;
        static_assert(PARTS % SLOTS == 0, "every slot has as many parts");

        const Router& router;
        const Weights& weights;
        i64 pair;  // first pair of the row

        __device__ __forceinline__ bool enter(u32& part, const u16*& x, const uint4*& words, const u16*& scales,
                                              const u16*& zeros) const {
            const u32 slot = part / COUNT;
            part -= slot * COUNT;
            FAULT_SITE(slot_activations, x += slot * weights.K;)
            const int expert = router.expert(pair + slot);
            if (expert < 0) return false;
            words += weights.words_of(expert);
            scales += weights.scales_of(expert), zeros += weights.zeros_of(expert);
            return true;
        }
    };

    static __device__ __forceinline__ void gate_up(const u16* x, const Weights& weights, const Router& router,
                                                   const float* routing, u16* inner, int M, i64 x_stride, int dependent) {
        // The previous kernel writes ids, weights and activations.
        FAULT_SITE(choice_waits, if (dependent) wait_for_previous_kernel();)
        const int pairs = M * SLOTS, unit = blockIdx.x / CLUSTER, tile = unit / pairs, pair = unit - tile * pairs;
        const int expert = router.expert(pair);
        if (expert < 0) return;
        const u16 *row = x + pair / SLOTS * x_stride, *scales = weights.scales + weights.scales_of(expert);
        const float weight = routing[pair];
        Gemm::run(row, weights.words + weights.words_of(expert), scales, weights.zeros + weights.zeros_of(expert), 1, weights.N,
                  weights.K, x_stride, 0, tile * CLUSTER + blockIdx.x % CLUSTER, EvenParts<PARTS>(),
                  [&](const float* buffer, int, int n0, u32 rank) {
                      store_inner<TILE_M>(buffer, 1, weights, [&](int, i64& of, int& chosen, float& by) {
                          of = pair, chosen = expert, by = weight;
                          return true;
                      }, inner, n0, rank);
                  });
    }

    // Four biases of an expert from column n on.
    static __device__ __forceinline__ float4 bias_of(const Weights& weights, int expert, int n) {
        const uint2 v = *reinterpret_cast<const uint2*>(weights.bias + (i64)expert * weights.N + n);
        return make_float4(widen_half<E, 0>(v.x), widen_half<E, 1>(v.x), widen_half<E, 0>(v.y), widen_half<E, 1>(v.y));
    }

    // Stores weight * activation(gate) * up of the product's first `columns` columns (a part has COLUMNS of them), as far as they
    // are pairs: find(column, pair, expert, weight) tells. Blocks of 16 columns of the weights alternate: gate, up.
    template <int COLUMNS, typename Find>
    static __device__ __forceinline__ void store_inner(const float* buffer, int columns, const Weights& weights, Find find,
                                                       u16* inner, int n0, u32 rank) {
        if constexpr (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        constexpr int FOURS = TILE_N / 8;  // vectors of four results of a column
        for (int four = rank * THREADS + threadIdx.x; four < FAULT_SITE(inner_columns, columns) * FOURS; four += CLUSTER * THREADS) {
            const int column = COLUMNS == 1 ? 0 : four / FOURS, j = 4 * (four - column * FOURS), n = j / 16 * 32 + j % 16;
            i64 pair;
            int expert;
            float weight;
            if (n0 + n >= weights.N || !find(column, pair, expert, weight)) continue;
            float4 gate = add_parts<COLUMNS, PITCH, WARPS_K, CLUSTER>(buffer, column, n);
            float4 up = add_parts<COLUMNS, PITCH, WARPS_K, CLUSTER>(buffer, column, n + 16);
            if constexpr (C::BIASED) {
                const float4 of_gate = bias_of(weights, expert, n0 + n), of_up = bias_of(weights, expert, n0 + n + 16);
                gate.x += of_gate.x, gate.y += of_gate.y, gate.z += of_gate.z, gate.w += of_gate.w;
                up.x += of_up.x, up.y += of_up.y, up.z += of_up.z, up.w += of_up.w;
            }
            store_global(inner + pair * (weights.N / 2) + n0 / 2 + j,
                         make_uint2(E::narrow(FAULT_SITE(routing_weight, gated<C::ACTIVATION>(gate.x, up.x) * weight),
                                              gated<C::ACTIVATION>(gate.y, up.y) * weight),
                                    E::narrow(gated<C::ACTIVATION>(gate.z, up.z) * weight,
                                              gated<C::ACTIVATION>(gate.w, up.w) * weight)));
        }
        // A block stays until its shared memory has been read.
        if constexpr (CLUSTER > 1) {
            cluster_arrive_relaxed();
            cluster_wait();
        }
    }

    // Rows m0 .. m0 + rows - 1 of the layer's result, of which `pair` is the first pair.
    template <int COLUMNS>
    static __device__ __forceinline__ void store_rows(const float* buffer, const Weights& weights, const Router& router,
                                                      const float* routing, i64 pair, u16* out, int m0, int rows, int n0,
                                                      u32 rank) {
        if constexpr (!C::BIASED) {
            reduce_and_store<E, Activation::NONE, COLUMNS, TILE_N, PITCH, WARPS_K, CLUSTER, THREADS>(
                buffer, nullptr, out, weights.N, m0, n0, m0 + rows, weights.N, rank, [] { __syncthreads(); });
        } else {
            if constexpr (CLUSTER > 1) {
                cluster_arrive();
                cluster_wait();
            } else {
                __syncthreads();
            }
            constexpr int FOURS = TILE_N / 4;
            for (int four = rank * THREADS + threadIdx.x; four < rows * FOURS; four += CLUSTER * THREADS) {
                const int m = four / FOURS, n = 4 * (four - m * FOURS);
                if (n0 + n >= weights.N) continue;
                float4 sum = add_parts<COLUMNS, PITCH, WARPS_K, CLUSTER>(buffer, m, n);
                for (int s = 0; s < SLOTS; ++s) {
                    const int expert = router.expert(pair + m * SLOTS + s);
                    if (expert < 0) continue;
                    const float weight = routing[pair + m * SLOTS + s];
                    const float4 bias = bias_of(weights, expert, n0 + n);
                    sum.x = fmaf(weight, bias.x, sum.x), sum.y = fmaf(weight, bias.y, sum.y);
                    sum.z = fmaf(weight, bias.z, sum.z), sum.w = fmaf(weight, bias.w, sum.w);
                }
                store_global(out + (i64)(m0 + m) * weights.N + n0 + n,
                             make_uint2(E::narrow(sum.x, sum.y), E::narrow(sum.z, sum.w)));
            }
            if constexpr (CLUSTER > 1) {
                cluster_arrive_relaxed();
                cluster_wait();
            }
        }
    }

    // Ids were written before the previous kernel began, so weights are requested without waiting for that kernel.
    static __device__ __forceinline__ void down(const u16* inner, const Weights& weights, const Router& router,
                                                const float* routing, u16* out, int M, int dependent) {
        const int unit = blockIdx.x / CLUSTER, tile = unit / M, m = unit - tile * M;
        const SlotParts parts{router, weights, (i64)m * SLOTS};
        Gemm::run(inner + (i64)m * SLOTS * weights.K, weights.words, weights.scales, weights.zeros, 1, weights.N, weights.K, 0,
                  dependent, tile * CLUSTER + blockIdx.x % CLUSTER, parts,
                  [&](const float* buffer, int, int n0, u32 rank) {
                      store_rows<TILE_M>(buffer, weights, router, routing, (i64)m * SLOTS, out, m, 1, n0, rank);
                  });
    }
};

#define INSTANTIATE_EXPERTS_STREAM(NAME, CONFIGURATION)                                                                      \
    extern "C" __global__ void __launch_bounds__(StreamGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)              \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                                       \
    NAME(const u16* x, const uint4* words, const u16* scales, const u16* zeros, const u16* bias, const int* ids,             \
         const int* map, const float* routing, u16* out, int M, int N, int K, int experts, int map_size, i64 x_stride,       \
         int dependent, int own, i64 words_apart, i64 scales_apart, i64 zeros_apart) {                                       \
        typedef ExpertsStream<CONFIGURATION> Layer;                                                                          \
        const typename Layer::Weights weights{words, scales, zeros, bias, N, K, own, words_apart, scales_apart, zeros_apart}; \
        const typename Layer::Router router{ids, map, map_size, experts};                                                    \
        if constexpr (CONFIGURATION::GATED)                                                                                  \
            Layer::gate_up(x, weights, router, routing, out, M, x_stride, dependent);                                        \
        else                                                                                                                 \
            Layer::down(x, weights, router, routing, out, M, dependent);                                                     \
    }
