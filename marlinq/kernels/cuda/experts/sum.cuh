// The end of a routed layer: sums the results of each row's experts, times the routing weights.
//
//   out[m] = sum_s weights[m, s] * y[places[m, s]]     slots in order, in float32, so the result has the same bits every time
//
// Eight columns a thread. Pairs whose place is -1 add nothing.
//
// Configuration: Element, THREADS.
#pragma once
#include "fault_site.cuh"
#include "ptx/launch.cuh"
#include "step/rows.cuh"

template <typename C>
__device__ __forceinline__ void sum_experts(const uint4* y, const int* places, const float* weights, uint4* out, int M, int T,
                                            int H) {
    typedef typename C::Element E;
    launch_dependents();
    const i64 vector = (i64)blockIdx.x * C::THREADS + threadIdx.x;
    const int vectors = H / 8, j = vector % vectors;
    const i64 m = vector / vectors;
    FAULT_SITE(expert_sum_waits, wait_for_previous_kernel();)
    if (m >= M) return;
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.f;
#pragma unroll 4
    for (int s = 0; s < T; ++s) {
        const int place = load_scalar(places + m * T + s);
        FAULT_SITE(pair_elsewhere, if (place < 0) continue;)
        const float weight = load_scalar(weights + m * T + s);
        float row[8];
        widen_vector<E>(row, load_l2(y + (i64)place * vectors + j));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight, row[i], sum[i]);
    }
    out[vector] = narrow_vector<E>(sum);
}

#define INSTANTIATE_EXPERTS_SUM(NAME, CONFIGURATION)                                                             \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                                         \
    NAME(const uint4* y, const int* places, const float* weights, uint4* out, int M, int T, int H) {             \
        sum_experts<CONFIGURATION>(y, places, weights, out, M, T, H);                                            \
    }
