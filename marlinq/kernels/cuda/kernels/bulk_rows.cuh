// The bulk kernel as one of a chain's products whose results are added to the residual stream (epilogue/rows.cuh).
//
// Configuration: the bulk kernel's, NORMED (false: it takes activations as they are) and ADDS.
#pragma once
#include "kernels/bulk.cuh"

#define INSTANTIATE_W4A16_BULK_ROWS(NAME, CONFIGURATION)                                                            \
    extern "C" __global__ void __launch_bounds__(BulkGemm<CONFIGURATION>::THREADS, CONFIGURATION::MIN_BLOCKS)       \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                              \
    NAME(const __grid_constant__ ActivationMaps x, const __grid_constant__ WeightMaps maps,                         \
         const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,               \
         u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent, const float* squares,           \
         int parts, float unit, float eps, float inverse_width, const u16* residual, const float4* weight,          \
         u16* stored, float* squares_out, i64 residual_stride, float factor) {                                      \
        const RowOperands given{squares, parts,  unit,        eps,             inverse_width, residual,             \
                                weight,  stored, squares_out, residual_stride, factor};                             \
        BulkGemm<CONFIGURATION>::run(x, maps, scales, zeros, bias, out, M, N, K, out_stride, dependent,             \
                                     PushedRows<CONFIGURATION::NORMED, CONFIGURATION::ADDS>{given, nullptr, N});    \
    }
