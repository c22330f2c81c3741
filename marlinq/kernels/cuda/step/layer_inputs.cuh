// Per-layer inputs (Gemma 4): every layer l of the model gets a vector of P channels, besides the residual stream, for each row m.
//
//   out[m, l] = scale * (norm(x[m, l]) + embedding_scale * table[tokens[m], l])
//
// x: the projected embedding of the row's token, P channels a layer; the norm is taken over these P. table: a second embedding of each
// token, for all layers. A warp computes one layer of a row. It reads the table before it waits for the previous kernel, which writes x.
//
// Configuration: Element, P, WARPS, NORM (RMS or RMS_WIDE).
#pragma once
#include "fault_site.cuh"
#include "ptx/approximate.cuh"
#include "ptx/launch.cuh"
#include "step/rows.cuh"

template <typename C>
__device__ __forceinline__ void layer_inputs(const i64* tokens, const u32* table, const u32* x, const u16* weight, u32* out, int layers,
                                             i64 x_stride, i64 out_stride, float embedding_scale, float scale, float eps, float offset) {
    typedef typename C::Element E;
    constexpr int PAIRS = (C::P / 2 + 31) / 32;
    launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = (layers + C::WARPS - 1) / C::WARPS;
    const i64 m = blockIdx.x / blocks;
    const int layer = blockIdx.x % blocks * C::WARPS + warp;
    const bool there = layer < layers;
    const u32* row = table + (load_scalar(tokens + m) * layers + layer) * (C::P / 2);
    u32 found[PAIRS], given[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) found[i] = there && lane + 32 * i < C::P / 2 ? row[lane + 32 * i] : 0;
    FAULT_SITE(layer_inputs_wait, wait_for_previous_kernel();)
    if (!there) return;
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = lane + 32 * i;
        given[i] = pair < C::P / 2 ? load_l2_word(x + m * (x_stride / 2) + layer * (C::P / 2) + pair) : 0;
        const float low = widen_half<E, 0>(given[i]), high = widen_half<E, 1>(given[i]);
        squares += low * low + high * high;
    }
    const float factor = fast_reciprocal_root(warp_sum(squares) / C::P + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = lane + 32 * i;
        if (pair >= C::P / 2) continue;
        float y[2] = {widen_half<E, 0>(given[i]) * factor, widen_half<E, 1>(given[i]) * factor};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (C::NORM == Norm::RMS) y[j] = rounded<E>(y[j]);
            if (weight) y[j] *= E::widen(weight[2 * pair + j]) + offset;
            y[j] += rounded<E>(embedding_scale * (j ? widen_half<E, 1>(found[i]) : widen_half<E, 0>(found[i])));
        }
        out[m * (out_stride / 2) + layer * (C::P / 2) + pair] = E::narrow(scale * y[0], scale * y[1]);
    }
}

#define INSTANTIATE_STEP_LAYER_INPUTS(NAME, CONFIGURATION)                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * CONFIGURATION::WARPS)                                                   \
    NAME(const i64* tokens, const u32* table, const u32* x, const u16* weight, u32* out, int layers, i64 x_stride,            \
         i64 out_stride, float embedding_scale, float scale, float eps, float offset) {                                       \
        layer_inputs<CONFIGURATION>(tokens, table, x, weight, out, layers, x_stride, out_stride, embedding_scale, scale, eps, \
                                    offset);                                                                                  \
    }
