// The stream kernel as one of a chain's products whose activations are not normalised yet, or whose results are added to the
// residual stream (epilogue/rows.cuh).
//
// Configuration: the stream kernel's, NORMED and ADDS.
#pragma once
#include "kernels/stream.cuh"

template <typename C>
struct StreamRows {
    typedef StreamGemm<C> Gemm;
    static constexpr int TILE_M = Gemm::TILE_M, TILE_N = Gemm::TILE_N, CLUSTER = Gemm::CLUSTER, WARPS_K = Gemm::WARPS_K;
    static_assert(!C::ADDS || C::PAIR_ACTIVATION == Activation::NONE, "no activation is added to the residual stream");

    static __device__ __forceinline__ void run(const u16* __restrict__ x, const uint4* __restrict__ words,
                                               const u16* __restrict__ scales, const u16* __restrict__ zeros,
                                               const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,
                                               i64 x_stride, i64 out_stride, int dependent, const RowOperands& given) {
        __shared__ float factors[TILE_M];
        RowEpilogue<C::NORMED, C::ADDS, TILE_M, TILE_N, Gemm::THREADS> work{given, factors, N};
        Gemm::run(
            x, words, scales, zeros, M, N, K, x_stride, dependent, blockIdx.x, EvenParts<CLUSTER * WARPS_K>(),
            [&](const float* buffer, int m0, int n0, u32 rank) {
                reduce_and_store<typename Gemm::E, C::PAIR_ACTIVATION, TILE_M, TILE_N, Gemm::PITCH, WARPS_K, CLUSTER,
                                 Gemm::THREADS>(
                    buffer, bias, out, out_stride, m0, n0, M, N, rank, [] { __syncthreads(); }, work);
            },
            [&](int m0, int n0, u32 rank, int rows) { work.begin(m0, n0, rank, rows); });
    }
};

#define INSTANTIATE_W4A16_STREAM_ROWS(NAME, CONFIGURATION)                                                          \
    extern "C" __global__ void __launch_bounds__(StreamGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)     \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                              \
    NAME(const u16* __restrict__ x, const uint4* __restrict__ words, const u16* __restrict__ scales,                \
         const u16* __restrict__ zeros, const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,   \
         i64 x_stride, i64 out_stride, int dependent, const float* squares, int parts, float unit, float eps,       \
         float inverse_width, const u16* residual, const float4* weight, u16* stored, float* squares_out,           \
         i64 residual_stride, float factor) {                                                                       \
        const RowOperands given{squares, parts,  unit,        eps,             inverse_width, residual,             \
                                weight,  stored, squares_out, residual_stride, factor};                             \
        StreamRows<CONFIGURATION>::run(x, words, scales, zeros, bias, out, M, N, K, x_stride, out_stride, dependent, given); \
    }
