// A plain read of a layer's words and scales: a lower bound for the time of any kernel that reads these bytes in one launch.
//
// Threads of the whole grid read neighbouring 16-byte vectors, UNROLL of them in flight a thread. The words come first,
// the scales follow as if they were one array.
//
// Configuration: THREADS, UNROLL.
#pragma once
#include "ptx/memory.cuh"

template <typename C>
__device__ __forceinline__ void read_once(const uint4* __restrict__ words, i64 word_vectors,
                                          const uint4* __restrict__ scales, i64 scale_vectors, u32* sink) {
    const i64 total = word_vectors + scale_vectors, stride = (i64)gridDim.x * C::THREADS;
    u32 sum = 0;
    for (i64 at = (i64)blockIdx.x * C::THREADS + threadIdx.x; at < total; at += C::UNROLL * stride) {
        uint4 value[C::UNROLL];
        if (at + (C::UNROLL - 1) * stride < word_vectors) {
#pragma unroll
            for (int u = 0; u < C::UNROLL; ++u) value[u] = load_streaming(words + at + u * stride);
        } else {
#pragma unroll
            for (int u = 0; u < C::UNROLL; ++u) {
                const i64 i = at + u * stride;
                value[u] = make_uint4(0, 0, 0, 0);
                if (i < word_vectors)
                    value[u] = load_streaming(words + i);
                else if (i < total)
                    value[u] = load_streaming(scales + (i - word_vectors));
            }
        }
#pragma unroll
        for (int u = 0; u < C::UNROLL; ++u) sum ^= value[u].x ^ value[u].y ^ value[u].z ^ value[u].w;
    }
    // Never true in practice, but the compiler can't know that, so it keeps the loads.
    if (sum == 0x9e3779b9u) *sink = sum;
}

#define INSTANTIATE_COLD_READ(NAME, CONFIGURATION)                                                                  \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                                            \
    NAME(const uint4* __restrict__ words, i64 word_vectors, const uint4* __restrict__ scales, i64 scale_vectors,    \
         u32* sink) {                                                                                               \
        read_once<CONFIGURATION>(words, word_vectors, scales, scale_vectors, sink);                                 \
    }
