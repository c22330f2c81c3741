// A routed layer for a few rows in two launches, built on the stream kernel (kernels/stream.cuh): no sorting, no gathering and no
// sum of their own.
//
//   GATED   every pair (row of the batch, slot) is a product of its own, of one row with the gate and up of its expert:
//           inner[pair, j] = weights[pair] * activation(gate[j]) * up[j]
//   else    every row of the batch is a product with the down weights of its T experts, one below the other:
//           out[m, n] = sum_s sum_j inner[m T + s, j] * down[ids[m, s]][j, n]
//           The parts of K, warps and blocks of a cluster, are dealt to the slots. So the sum over the slots is the
//           reduction of split-K, in a fixed order.
//
// Pairs, or rows, that share columns are neighbours in the grid: weights that they share come from L2 after the first.
// A pair whose expert is elsewhere is left out.
//
// Configuration: that of kernels/stream.cuh, GATED, ACTIVATION, WIDE (64-bit ids), SLOTS (T; parts are a multiple of it).
#pragma once
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

    // Where an expert's weights begin.
    struct Weights {
        const uint4* words;
        const u16 *scales, *zeros;
        int N, K;

        __device__ __forceinline__ i64 vectors() const { return (i64)(K / 16) * (N / 2); }
        __device__ __forceinline__ i64 numbers() const {
            return (i64)(Gemm::QUANT_GROUP == 0 ? 1 : K / (Gemm::QUANT_GROUP == 0 ? 1 : Gemm::QUANT_GROUP)) * N;
        }
    };

    // Parts that are dealt to the slots of a row.
    struct SlotParts {
        static constexpr u32 COUNT = PARTS / SLOTS;
        static_assert(PARTS % SLOTS == 0, "every slot has as many parts");

        const Router& router;
        const Weights& weights;
        i64 pair;  // the row's first

        __device__ __forceinline__ bool enter(u32& part, const u16*& x, const uint4*& words, const u16*& scales,
                                              const u16*& zeros) const {
            const u32 slot = part / COUNT;
            part -= slot * COUNT;
            x += slot * weights.K;
            const int expert = router.expert(pair + slot);
            if (expert < 0) return false;
            words += expert * weights.vectors();
            scales += expert * weights.numbers(), zeros += expert * weights.numbers();
            return true;
        }
    };

    static __device__ __forceinline__ void gate_up(const u16* x, const Weights& weights, const Router& router,
                                                   const float* routing, u16* inner, int M, i64 x_stride, int dependent) {
        // Ids, weights and activations are the previous kernel's.
        if (dependent) wait_for_previous_kernel();
        const int pairs = M * SLOTS, unit = blockIdx.x / CLUSTER, tile = unit / pairs, pair = unit - tile * pairs;
        const int expert = router.expert(pair);
        if (expert < 0) return;
        const u16 *row = x + pair / SLOTS * x_stride, *scales = weights.scales + expert * weights.numbers();
        const float weight = routing[pair];
        Gemm::run(row, weights.words + expert * weights.vectors(), scales, weights.zeros + expert * weights.numbers(), 1,
                  weights.N, weights.K, x_stride, 0, tile * CLUSTER + blockIdx.x % CLUSTER, EvenParts<PARTS>(),
                  [&](const float* buffer, int, int n0, u32 rank) {
                      store_inner(buffer, weight, inner + (i64)pair * (weights.N / 2), n0, weights.N, rank);
                  });
    }

    // Blocks of 16 columns take turns: gate, up.
    static __device__ __forceinline__ void store_inner(const float* buffer, float weight, u16* inner, int n0, int N, u32 rank) {
        if constexpr (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        for (int four = rank * THREADS + threadIdx.x; four < TILE_N / 8; four += CLUSTER * THREADS) {
            const int j = 4 * four, n = j / 16 * 32 + j % 16;
            if (n0 + n >= N) continue;
            const float4 gate = add_parts<TILE_M, PITCH, WARPS_K, CLUSTER>(buffer, 0, n);
            const float4 up = add_parts<TILE_M, PITCH, WARPS_K, CLUSTER>(buffer, 0, n + 16);
            store_global(inner + n0 / 2 + j,
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
        const int unit = blockIdx.x / CLUSTER, tile = unit / M, m = unit - tile * M;
        const SlotParts parts{router, weights, (i64)m * SLOTS};
        u16* row = out + (i64)m * weights.N;
        Gemm::run(inner + (i64)m * SLOTS * weights.K, weights.words, weights.scales, weights.zeros, 1, weights.N, weights.K, 0,
                  dependent, tile * CLUSTER + blockIdx.x % CLUSTER, parts,
                  [&](const float* buffer, int, int n0, u32 rank) {
                      reduce_and_store<E, Activation::NONE, TILE_M, TILE_N, PITCH, WARPS_K, CLUSTER, THREADS>(
                          buffer, nullptr, row, weights.N, 0, n0, 1, weights.N, rank, [] { __syncthreads(); });
                  });
    }
};

#define INSTANTIATE_EXPERTS_STREAM(NAME, CONFIGURATION)                                                                      \
    extern "C" __global__ void __launch_bounds__(StreamGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)              \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                                       \
    NAME(const u16* x, const uint4* words, const u16* scales, const u16* zeros, const int* ids, const int* map,              \
         const float* routing, u16* out, int M, int N, int K, int experts, int map_size, i64 x_stride, int dependent) {      \
        typedef ExpertsStream<CONFIGURATION> Layer;                                                                          \
        const typename Layer::Weights weights{words, scales, zeros, N, K};                                                   \
        const typename Layer::Router router{ids, map, map_size, experts};                                                    \
        if constexpr (CONFIGURATION::GATED)                                                                                  \
            Layer::gate_up(x, weights, router, routing, out, M, x_stride, dependent);                                        \
        else                                                                                                                 \
            Layer::down(x, weights, router, out, M, dependent);                                                              \
    }
