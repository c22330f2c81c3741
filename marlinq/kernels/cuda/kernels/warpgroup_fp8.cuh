// The warpgroup kernel with FP8 activations: 4-bit weights, symmetric in groups of 128, as E4M3, times activations that
// kernels/quantize_rows.cuh has rounded to E4M3, with a scale for each row, or for each row and group.
//
//   out[m, n] = sum_g row_scale[g, m] * scale[g, n] * (sum_{k in g} x[m, k] * (code[k, n] - 8)) + bias[n]
//
// Operand A has the codes alone (codec/int4_e4m3.cuh). The 8 that they are too large by times the sums of the activations come first: for every
// 4,096 channels a chunk of K whose operands are scales and sums (mma/fp8_loop.cuh).
//
// The stored words are those of all kernels. Their channels come in another order within 32 (codec/int4_e4m3.cuh), in which the
// activations lie, too.
//
// Configuration: as kernels/warpgroup.cuh, with SCALING SUMS, ROWS 8, PARTS_K 1 and CLUSTER 1; and CHUNK_SCALES, whether rows have a
// scale for each group.
#pragma once
#include "kernels/warpgroup.cuh"
#include "mma/fp8_loop.cuh"

template <typename C>
struct WarpgroupFp8 {
    typedef WarpgroupShape<C, EightBits<C::CHUNK_SCALES>> Shape;
    typedef WarpgroupGemm<C, Shape, Fp8Loop<Shape>> Gemm;
};

#define INSTANTIATE_W4A8_WGMMA(NAME, CONFIGURATION)                                                                           \
    extern "C" __global__ void __launch_bounds__(WarpgroupFp8<CONFIGURATION>::Gemm::THREADS, CONFIGURATION::MIN_BLOCKS)       \
    NAME(const __grid_constant__ ScaledActivationMaps x, const __grid_constant__ WeightMaps maps,                             \
         const u16* __restrict__ scales, const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,            \
         i64 out_stride, int dependent, float* partials, u32* flags) {                                                        \
        WarpgroupFp8<CONFIGURATION>::Gemm::run(x, maps, scales, nullptr, bias, out, M, N, K, out_stride, dependent, partials, \
                                               flags);                                                                        \
    }
