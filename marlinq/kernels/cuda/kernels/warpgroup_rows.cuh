// The warpgroup kernel as one of a chain's products whose activations are not normalised yet, or whose results are added to the
// residual stream (epilogue/rows.cuh). Its tiles' sums meet: K is split, or an activation follows.
//
// Configuration: the warpgroup kernel's, NORMED and ADDS.
#pragma once
#include "kernels/warpgroup.cuh"

template <typename C>
struct WarpgroupRows {
    typedef WarpgroupGemm<C> Gemm;
    static_assert(!C::ADDS || C::PAIR_ACTIVATION == Activation::NONE, "no activation is added to the residual stream");

    static __device__ __forceinline__ void run(const ActivationMaps& x, const WeightMaps& maps,
                                               const u16* __restrict__ scales, const u16* __restrict__ zeros,
                                               const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,
                                               i64 out_stride, int dependent, const RowOperands& given) {
        __shared__ float factors[Gemm::TILE_M];
        const auto run = [&](auto work) {
            Gemm::run(x, maps, scales, zeros, bias, out, M, N, K, out_stride, dependent, nullptr, nullptr, work, factors);
        };
        if constexpr (Gemm::PUSH_SUMS) {
            run(PushedRows<C::NORMED, C::ADDS>{given, factors, N});
        } else {
            constexpr int REDUCING = Gemm::CLUSTER == 1 ? 128 * Gemm::CONSUMERS : Gemm::THREADS;
            run(RowEpilogue<C::NORMED, C::ADDS, Gemm::TILE_M, Gemm::TILE_N, REDUCING>{given, factors, N});
        }
    }
};

#define INSTANTIATE_W4A16_WGMMA_ROWS(NAME, CONFIGURATION)                                                           \
    extern "C" __global__ void __launch_bounds__(WarpgroupGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)  \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                              \
    NAME(const __grid_constant__ ActivationMaps x, const __grid_constant__ WeightMaps maps,                         \
         const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,               \
         u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent, const float* squares,           \
         int parts, float unit, float eps, float inverse_width, const u16* residual, const float4* weight,          \
         u16* stored, float* squares_out, i64 residual_stride, float factor) {                                      \
        const RowOperands given{squares, parts,  unit,        eps,             inverse_width, residual,             \
                                weight,  stored, squares_out, residual_stride, factor};                             \
        WarpgroupRows<CONFIGURATION>::run(x, maps, scales, zeros, bias, out, M, N, K, out_stride, dependent, given); \
    }
