// A scale as a checkpoint holds it: storable_scales of marlinq/methods/grid.py.
#pragma once
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/types.cuh"

struct Single {};

// Smallest normal and largest numbers of a scale's dtype, and a float rounded to it.
template <typename E>
struct Range;
template <>
struct Range<Half> {
    static constexpr float SMALLEST = 6.103515625e-05f, LARGEST = 65504.f;
};
template <>
struct Range<Bfloat16> {
    static constexpr float SMALLEST = 1.1754943508222875e-38f, LARGEST = 3.3895313892515355e+38f;
};
template <>
struct Range<Single> {
    static constexpr float SMALLEST = 1.1754943508222875e-38f, LARGEST = 3.4028234663852886e+38f;
};
template <typename E>
__device__ __forceinline__ float to_dtype(float x) {
    return E::widen(E::narrow(x, 0.f) & 0xffffu);
}
template <>
__device__ __forceinline__ float to_dtype<Single>(float x) {
    return x;
}

// Kept finite and among the normal numbers; any scale stores a channel of zeros.
template <typename E>
__device__ __forceinline__ float storable(float scale) {
    if (scale == 0.f) return 1.f;
    const float magnitude = to_dtype<E>(fminf(fmaxf(fabsf(scale), Range<E>::SMALLEST), Range<E>::LARGEST));
    return scale < 0.f ? -magnitude : magnitude;
}
