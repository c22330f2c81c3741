// Functions shared by the kernels between products: vectors of eight 16-bit elements as floats, sums over a warp and a block, loads
// of scalars that an earlier kernel writes.
#pragma once
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/memory.cuh"

// Normalisations: RMS rounds the normalised value before it is multiplied by the weight (Llama), RMS_WIDE after (Gemma), LAYER
// subtracts the mean first.
enum class Norm { NONE, RMS, RMS_WIDE, LAYER };

constexpr u32 ALL_LANES = 0xffffffffu;

// Not cached in L1, where an older value may lie: the kernel before this one may have written it after this one began.
template <typename T>
__device__ __forceinline__ T load_scalar(const T* pointer) {
    return *static_cast<const volatile T*>(pointer);
}

template <typename E>
__device__ __forceinline__ void widen_vector(float (&x)[8], const uint4& v) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = widen_half<E, 0>(pairs[i]);
        x[2 * i + 1] = widen_half<E, 1>(pairs[i]);
    }
}

template <typename E>
__device__ __forceinline__ uint4 narrow_vector(const float (&x)[8]) {
    return make_uint4(E::narrow(x[0], x[1]), E::narrow(x[2], x[3]), E::narrow(x[4], x[5]), E::narrow(x[6], x[7]));
}

// The value after rounding to E.
template <typename E>
__device__ __forceinline__ float rounded(float x) {
    return widen_half<E, 0>(E::narrow(x, 0.f));
}

__device__ __forceinline__ float of_lane(float value, int lane) {
    return __uint_as_float(__shfl_sync(ALL_LANES, __float_as_uint(value), lane));
}

__device__ __forceinline__ float warp_sum(float value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += of_lane(value, lane ^ distance);
    return value;
}

// The sum over the block's threads, in the same order for all of them. `sums` must not be in use by another sum.
template <int WARPS>
__device__ __forceinline__ float block_sum(float value, float (&sums)[WARPS]) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp];
    return total;
}
