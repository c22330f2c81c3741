// Between two products of the chain: eight 16-bit elements a thread, from y [M, PITCH] to x [M, K].
//
//   MODE 0   x[m, j] = y[m, j]                         the attention's place: the first K columns
//   MODE 1   x[m, j] = (y[m, j] + residual[m, j]) / 2  keeps the activations from growing from layer to layer
//   MODE 2   x[m, j] = silu(y[m, j]) * y[m, j + K]     between gate_up and down
//
// Configuration: Element, MODE.
#pragma once
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/launch.cuh"

template <typename C>
__device__ __forceinline__ u32 combine(u32 a, u32 b) {
    typedef typename C::Element E;
    const float a0 = widen_half<E, 0>(a), a1 = widen_half<E, 1>(a);
    const float b0 = widen_half<E, 0>(b), b1 = widen_half<E, 1>(b);
    if (C::MODE == 1) return E::narrow(0.5f * (a0 + b0), 0.5f * (a1 + b1));
    return E::narrow(a0 * b0 / (1.f + exp2f(-1.4426950f * a0)), a1 * b1 / (1.f + exp2f(-1.4426950f * a1)));
}

template <typename C>
__device__ __forceinline__ void glue(const uint4* __restrict__ y, const uint4* __restrict__ residual, uint4* __restrict__ x,
                                     int M, int K, int pitch) {
    launch_dependents();
    wait_for_previous_kernel();
    const int vectors = K / 8, index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= M * vectors) return;
    const int m = index / vectors, j = index % vectors;
    const uint4* row = y + (i64)m * (pitch / 8);
    const uint4 a = row[j];
    if (C::MODE == 0) {
        x[index] = a;
        return;
    }
    const uint4 b = C::MODE == 1 ? residual[index] : row[j + vectors];
    x[index] = make_uint4(combine<C>(a.x, b.x), combine<C>(a.y, b.y), combine<C>(a.z, b.z), combine<C>(a.w, b.w));
}

#define INSTANTIATE_CHAIN_GLUE(NAME, CONFIGURATION)                                                                 \
    extern "C" __global__ void NAME(const uint4* __restrict__ y, const uint4* __restrict__ residual,                \
                                    uint4* __restrict__ x, int M, int K, int pitch) {                               \
        glue<CONFIGURATION>(y, residual, x, M, K, pitch);                                                           \
    }
