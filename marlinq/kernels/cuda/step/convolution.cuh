// A new token of a short convolution between gates: three parts of a row of x, of which the first two are multiplied before it.
//
//   u = a * b;   out = c * (bias + sum over taps of weight[channel, tap] * u[tap])          a, b and c at their columns of x
//
// A thread takes two channels of a row. Inputs of the convolution lie in a ring of TAPS tokens, position p at p % TAPS. Those of
// earlier tokens are requested before the previous kernel has ended: a step's first kernel begins when all of the step before is done.
//
// Configuration: Element, THREADS, TAPS.
#pragma once
#include "fault_site.cuh"
#include "ptx/launch.cuh"
#include "step/rows.cuh"

// Mirrored in kernels/step/convolution.py.
struct GatedConvolution {
    const u32* x;
    u32* ring;
    const float *weight, *bias;
    const int* lengths;
    i64 x_stride, out_stride;
    int channels, first, second, gate;  // columns at which the parts begin
};

template <typename C>
__device__ __forceinline__ void gated_convolution(const GatedConvolution& given, u32* out) {
    typedef typename C::Element E;
    constexpr int TAPS = C::TAPS;
    launch_dependents();
    const int pairs = given.channels / 2, blocks = (pairs + C::THREADS - 1) / C::THREADS;
    const i64 row = blockIdx.x / blocks;
    const int pair = blockIdx.x % blocks * C::THREADS + threadIdx.x;
    const bool there = pair < pairs;
    const int position = load_scalar(given.lengths + row);
    u32* kept = given.ring + row * TAPS * pairs + pair;
    u32 inputs[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS - 1; ++tap) {
        const int before = position - (TAPS - 1) + tap;
        inputs[tap] = there && before >= 0 ? load_l2_word(kept + before % TAPS * (i64)pairs) : 0;
    }
    FAULT_SITE(convolution_waits, wait_for_previous_kernel();)
    if (!there) return;
    const u32* mine = given.x + row * (given.x_stride / 2) + pair;
    const u32 a = load_l2_word(mine + given.first / 2), b = load_l2_word(mine + given.second / 2), c = load_l2_word(mine + given.gate / 2);
    const u32 newest = E::narrow(widen_half<E, 0>(a) * widen_half<E, 0>(b), widen_half<E, 1>(a) * widen_half<E, 1>(b));
    inputs[TAPS - 1] = newest;
    kept[FAULT_SITE(convolution_place, position % TAPS) * (i64)pairs] = newest;
    float low = given.bias ? given.bias[2 * pair] : 0.f, high = given.bias ? given.bias[2 * pair + 1] : 0.f;
    const float* weight = given.weight + 2 * pair * TAPS;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        low += weight[tap] * widen_half<E, 0>(inputs[tap]);
        high += weight[TAPS + tap] * widen_half<E, 1>(inputs[tap]);
    }
    out[row * (given.out_stride / 2) + pair] =
        E::narrow(widen_half<E, 0>(c) * rounded<E>(low), widen_half<E, 1>(c) * rounded<E>(high));
}

#define INSTANTIATE_STEP_CONVOLUTION(NAME, CONFIGURATION)                                                     \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS) NAME(GatedConvolution given, u32* out) { \
        gated_convolution<CONFIGURATION>(given, out);                                                         \
    }
