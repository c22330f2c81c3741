// Sums over the lower lanes of a warp.
#pragma once
#include "ptx/types.cuh"

// The sum of `value` over lower lanes; `all` becomes that over the warp.
__device__ __forceinline__ int scan_warp(int value, int lane, int& all) {
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_sync(0xffffffffu, sum, max(lane - distance, 0));
        if (lane >= distance) sum += other;
    }
    all = __shfl_sync(0xffffffffu, sum, 31);
    return sum - value;
}
