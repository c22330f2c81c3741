// Sums of a group of channels that are scaled when the group ends, for the kernels built on mma.sync.
#pragma once
#include "element.cuh"

struct Scales {
    u32 pair[4];  // q: the scales (or zero points) of this lane's rows n and n + 8 of block q
};

template <int BlocksM>
struct Accumulators {
    float value[4][BlocksM][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int b = 0; b < BlocksM; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) value[q][b][i] = 0.f;
    }
};

// total += scale * group, then start the next group.
template <typename E, int BlocksM>
__device__ __forceinline__ void close_group(Accumulators<BlocksM>& total, Accumulators<BlocksM>& group, const Scales& s) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const float scale[2] = {widen_half<E, 0>(s.pair[q]), widen_half<E, 1>(s.pair[q])};
#pragma unroll
        for (int b = 0; b < BlocksM; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                total.value[q][b][i] = fmaf(scale[i / 2], group.value[q][b][i], total.value[q][b][i]);
    }
    group.clear();
}
