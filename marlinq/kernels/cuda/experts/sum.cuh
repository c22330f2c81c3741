// The end of a routed layer: sums the results of each row's experts, times the routing weights.
//
//   out[m] = sum_s weights[m, s] * y[places[m, s]]     slots in order, in float32, so the result has the same bits every time
//
// A thread sums eight columns of a row; all threads of a block have the same row. Lanes load the places and weights of SLOTS slots
// together, and all SLOTS rows are requested before the first is needed: a small batch costs two trips to L2, one of
// which, for places and weights, is over before the previous kernel ends. Pairs whose place is -1 add nothing.
//
// Configuration: Element, THREADS (a multiple of 32).
#pragma once
#include "fault_site.cuh"
#include "ptx/launch.cuh"
#include "step/rows.cuh"

// Blocks a multiprocessor. Without this bound ptxas keeps to 32 registers and has two rows in flight instead of eight.
constexpr int SUM_BLOCKS = 8;

template <typename C>
__device__ __forceinline__ void sum_experts(const uint4* y, const int* places, const float* weights, uint4* out, int T, int H) {
    typedef typename C::Element E;
    constexpr int SLOTS = 8;
    launch_dependents();
    const int vectors = H / 8, blocks_of_row = (vectors + C::THREADS - 1) / C::THREADS, lane = threadIdx.x % 32;
    const i64 m = blockIdx.x / blocks_of_row;
    const int j = blockIdx.x % blocks_of_row * C::THREADS + threadIdx.x;
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.f;
    for (int first = 0; first < T; first += SLOTS) {
        const int slot = first + lane % SLOTS;
        // Written before the previous kernel began.
        const int place = slot < T ? load_scalar(places + m * T + slot) : -1;
        const float weight = place >= 0 ? load_scalar(weights + m * T + slot) : 0.f;
        FAULT_SITE(expert_sum_waits, if (first == 0) wait_for_previous_kernel();)
        uint4 rows[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const int from = __shfl_sync(ALL_LANES, place, s);
            rows[s] = make_uint4(0, 0, 0, 0);
            if (FAULT_SITE(pair_elsewhere, from >= 0 &&) j < vectors) rows[s] = load_l2(y + (i64)from * vectors + j);
        }
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const float by = of_lane(weight, s);
            float row[8];
            widen_vector<E>(row, rows[s]);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = fmaf(by, row[i], sum[i]);
        }
    }
    if (j < vectors) out[m * vectors + j] = narrow_vector<E>(sum);
}

#define INSTANTIATE_EXPERTS_SUM(NAME, CONFIGURATION)                                                             \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS, SUM_BLOCKS)                             \
    NAME(const uint4* y, const int* places, const float* weights, uint4* out, int T, int H) {                    \
        sum_experts<CONFIGURATION>(y, places, weights, out, T, H);                                               \
    }
