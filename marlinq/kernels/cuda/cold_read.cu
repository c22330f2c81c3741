// A plain read of a layer's words and scales: the time that no kernel which needs those bytes can beat in one launch.
//
// Threads of the whole grid read neighbouring 16-byte vectors, UNROLL of them in flight a thread. The words come first,
// the scales follow as if they were one array.
//
// Compile-time parameters: THREADS, UNROLL.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
cold_read(const uint4* __restrict__ words, i64 word_vectors, const uint4* __restrict__ scales, i64 scale_vectors,
          u32* sink) {
    const i64 total = word_vectors + scale_vectors, stride = (i64)gridDim.x * THREADS;
    u32 sum = 0;
    for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < total; at += UNROLL * stride) {
        uint4 value[UNROLL];
        if (at + (UNROLL - 1) * stride < word_vectors) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) value[u] = load_streaming(words + at + u * stride);
        } else {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const i64 i = at + u * stride;
                value[u] = make_uint4(0, 0, 0, 0);
                if (i < word_vectors)
                    value[u] = load_streaming(words + i);
                else if (i < total)
                    value[u] = load_streaming(scales + (i - word_vectors));
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) sum ^= value[u].x ^ value[u].y ^ value[u].z ^ value[u].w;
    }
    // Nobody reads the sink; the condition, which the compiler can't decide, keeps the loads.
    if (sum == 0x9e3779b9u) *sink = sum;
}
