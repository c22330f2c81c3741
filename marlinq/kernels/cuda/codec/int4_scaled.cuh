// int4 to (code - 8) * scale in one fused instruction, for weights without stored zero points.
//
// A masked nibble is a subnormal number, u times the code. So (code - 8) * scale = factor * nibble + shift
// with factor = scale / u and shift = -8 * scale. Both are the scale times a power of two: the only rounding is that of the
// fused multiply-add.
//
// float16: u = 2^-24 (low nibbles) or 2^-20 (high nibbles), and factors would leave the range of the type. So scales are
// multiplied by a power of two, their column's normalizer. It is chosen to bring the largest scale seen so far to 2 .. 4, and
// chosen anew only when a scale reaches 16. Then factor = 2^12 * scale, and weights are 2^-12 of what they should be; `unit`
// undoes both on the sums. A scale more than eight times smaller than its column's largest may give subnormal weights: shift
// and product are rounded, so they are off by 2^-24 at most, which is 2^-13 of that largest scale.
//
// bfloat16 has room: u = 2^-133 or 2^-129, weights are 2^-30 of what they should be, and scales from 2^25 on become infinite.
#pragma once
#include "fault_site.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/bits.cuh"

// Factors of nibbles of the first and of the second kind, and the shift that is added: pairs for rows n and n + 8.
struct Factors {
    u32 first, second, shift;
};

template <typename E>
struct Int4Factors;

template <>
struct Int4Factors<Half> {
    // Whether scales need normalizers.
    static constexpr bool NORMALIZES = true;
    static constexpr u32 LARGEST_NORMALIZERS = 0x7c007c00u;  // larger than any
    // For a pair of columns, the smaller of `known` and the powers of two that bring their scales to 2 .. 4.
    static __device__ __forceinline__ u32 normalizers(u32 known, u32 scales) {
        const u32 low = 0x7c00u - max(scales & 0x7c00u, 0x400u), high = 0x7c00u - max(scales >> 16 & 0x7c00u, 0x400u);
        return min(known & 0xffffu, low) | FAULT_SITE(upper_normalizer, min(known >> 16, high)) << 16;
    }
    static __device__ __forceinline__ u32 normalize(u32 scales, u32 normalizers) { return Half::multiply(scales, normalizers); }
    // Not zero if one of a pair has become 16 or more.
    static __device__ __forceinline__ u32 outgrown(u32 normalized) {
        return ((normalized & 0x7c007c00u) + 0x34003400u) & 0x80008000u;
    }
    static __device__ __forceinline__ Factors factors(u32 normalized) {
        return {Half::multiply(normalized, 0x6c006c00u), Half::multiply(normalized, 0x5c005c00u),
                Half::multiply(normalized, 0x98009800u)};
    }
    // The factor of the final sums of column h of a pair.
    template <int H>
    static __device__ __forceinline__ float unit(u32 normalizers) {
        return __uint_as_float(154u - (H == 0 ? normalizers >> 10 & 31u : normalizers >> 26) << 23);
    }
    // The factor of the sums of column h when its normalizer changes.
    template <int H>
    static __device__ __forceinline__ float ratio(u32 now, u32 before) {
        return unit<H>(before) / unit<H>(now);
    }
};

template <>
struct Int4Factors<Bfloat16> {
    static constexpr bool NORMALIZES = false;
    static constexpr u32 LARGEST_NORMALIZERS = 0;
    static __device__ __forceinline__ u32 normalizers(u32, u32) { return 0; }
    static __device__ __forceinline__ u32 normalize(u32 scales, u32) { return scales; }
    static __device__ __forceinline__ u32 outgrown(u32) { return 0; }
    static __device__ __forceinline__ Factors factors(u32 scales) {
        return {Bfloat16::multiply(scales, 0x73007300u), Bfloat16::multiply(scales, 0x71007100u),
                Bfloat16::multiply(scales, 0xb200b200u)};
    }
    template <int H>
    static __device__ __forceinline__ float unit(u32) {
        return 1073741824.f;
    }
    template <int H>
    static __device__ __forceinline__ float ratio(u32, u32) {
        return 1.f;
    }
};

template <typename E>
struct Int4Scaled : Int4Factors<E> {
    static __device__ __forceinline__ void scaled(u32 word, u32 (&a)[4], const Factors& factors) {
        const u32 upper = word >> 8;
        a[0] = E::multiply_add(word & 0x000f000fu, broadcast<0>(factors.first), broadcast<0>(factors.shift));
        a[2] = E::multiply_add(word & 0x00f000f0u, broadcast<0>(factors.second), broadcast<0>(factors.shift));
        a[1] = E::multiply_add(upper & 0x000f000fu, broadcast<1>(factors.first), FAULT_SITE(shift_of_channels, broadcast<1>(factors.shift)));
        a[3] = E::multiply_add(upper & 0x00f000f0u, broadcast<1>(factors.second), broadcast<1>(factors.shift));
    }
};
