// The activation of an MLP, between its two products:
//
//   out[m, j] = activation(scale * gate[m, j]) * up[m, j]      GATED
//   out[m, j] = activation(scale * gate[m, j])                 otherwise
//
// x holds gate. With TILES it holds up too: 64 columns of gate, 64 of up, and so on in turns. Without TILES up begins at `other`, with
// a row stride given separately: another tensor, or later columns of x. A thread computes eight elements.
//
// Configuration: Element, THREADS, ACTIVATION, GATED, TILES.
#pragma once
#include "epilogue/activation.cuh"
#include "ptx/launch.cuh"
#include "step/rows.cuh"

template <typename C>
__device__ __forceinline__ void activate(const uint4* x, const uint4* other, uint4* out, int M, int columns, i64 x_stride,
                                         i64 other_stride, i64 out_stride, float scale) {
    typedef typename C::Element E;
    launch_dependents();
    const i64 vector = (i64)blockIdx.x * C::THREADS + threadIdx.x;
    const int vectors = columns / 8, j = vector % vectors;
    const i64 m = vector / vectors;
    wait_for_previous_kernel();
    if (m >= M) return;
    const uint4* row = x + m * (x_stride / 8);
    // A tile is 8 vectors.
    const int at = C::TILES ? j / 8 * 16 + j % 8 : j;
    float gate[8], up[8];
    const uint4 first = load_l2(row + at);
    uint4 second = first;
    if (C::GATED) second = load_l2(C::TILES ? row + at + 8 : other + m * (other_stride / 8) + j);
    widen_vector<E>(gate, first);
    widen_vector<E>(up, second);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = activation<C::ACTIVATION>(scale * gate[i]) * (C::GATED ? up[i] : 1.f);
    out[m * (out_stride / 8) + j] = narrow_vector<E>(gate);
}

#define INSTANTIATE_STEP_ACTIVATE(NAME, CONFIGURATION)                                                        \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                                      \
    NAME(const uint4* x, const uint4* other, uint4* out, int M, int columns, i64 x_stride, i64 other_stride,  \
         i64 out_stride, float scale) {                                                                       \
        activate<CONFIGURATION>(x, other, out, M, columns, x_stride, other_stride, out_stride, scale);        \
    }
