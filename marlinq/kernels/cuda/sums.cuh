// Sums of a group of channels that are scaled when the group ends, for the kernels built on mma.sync.
#pragma once
#include "element.cuh"

struct Scales {
    u32 pair[4];  // q: the scales (or zero points) of this lane's rows n and n + 8 of block q
};

template <int BlocksM, bool Zeros>
struct Accumulators {
    float value[4][BlocksM][4];
    float sum_x[Zeros ? BlocksM : 1][4];  // column sums of the activations, for the zero points

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int b = 0; b < BlocksM; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) value[q][b][i] = 0.f;
#pragma unroll
        for (int b = 0; b < (Zeros ? BlocksM : 1); ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum_x[b][i] = 0.f;
    }
};

// total += scale * (group - (zero - 8) * sum_x), then start the next group.
template <typename E, int BlocksM, bool Zeros>
__device__ __forceinline__ void close_group(Accumulators<BlocksM, Zeros>& total, Accumulators<BlocksM, Zeros>& group,
                                            const Scales& s, const Scales& z) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const float scale[2] = {widen_half<E, 0>(s.pair[q]), widen_half<E, 1>(s.pair[q])};
        const float zero[2] = {Zeros ? 8.f - widen_half<E, 0>(z.pair[q]) : 0.f,
                               Zeros ? 8.f - widen_half<E, 1>(z.pair[q]) : 0.f};
#pragma unroll
        for (int b = 0; b < BlocksM; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float v = group.value[q][b][i];
                if (Zeros) v = fmaf(zero[i / 2], group.sum_x[b][i], v);
                total.value[q][b][i] = fmaf(scale[i / 2], v, total.value[q][b][i]);
            }
    }
    group.clear();
}
