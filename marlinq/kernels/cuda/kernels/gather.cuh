// Channels of activations in the order of a weight that was quantised in activation order.
//
//   out[m, j] = x[m, order[j]], zero where order[j] is negative
//
// Eight channels a thread. It lets the GEMM behind it begin at once, which requests its weights while this kernel runs.
//
// Configuration: THREADS.
#pragma once
#include "ptx/launch.cuh"

template <typename C>
__device__ __forceinline__ void gather_channels(const u16* __restrict__ x, const int4* __restrict__ order,
                                                uint4* __restrict__ out, int M, int K, i64 x_stride) {
    launch_dependents();
    const i64 vector = (i64)blockIdx.x * C::THREADS + threadIdx.x;
    const int vectors = K / 8, j = vector % vectors;
    const i64 m = vector / vectors;
    if (m >= M) return;
    const int4 low = order[2 * j], high = order[2 * j + 1];
    wait_for_previous_kernel();
    const u16* row = x + m * x_stride;
    const auto pair = [&](int first, int second) {
        const u32 a = first < 0 ? 0 : row[first], b = second < 0 ? 0 : row[second];
        return a | b << 16;
    };
    out[vector] = make_uint4(pair(low.x, low.y), pair(low.z, low.w), pair(high.x, high.y), pair(high.z, high.w));
}

#define INSTANTIATE_GATHER(NAME, CONFIGURATION)                                                                     \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                                            \
    NAME(const u16* __restrict__ x, const int4* __restrict__ order, uint4* __restrict__ out, int M, int K, i64 x_stride) { \
        gather_channels<CONFIGURATION>(x, order, out, M, K, x_stride);                                              \
    }
