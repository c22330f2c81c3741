// e4m3, the codec of FP8 weights with a sign, four bits of exponent and three of mantissa (codec/byte_order.cuh).
//
// Sign, exponent and mantissa go to their places in the wider format as they are, subnormals included. Only the bias of the
// exponent differs:
//
//   float16    bias 15 instead of 7: 2^-8 of the value, which the stored scales make up for
//   bfloat16   bias 127: 2^-120 of the value, whose products a float32 could not hold; one exact product with 2^120 undoes it
//
// Codes of NaN, 0x7f and 0xff, are not weights: loading refuses them.
#pragma once
#include "fault_site.cuh"
#include "codec/byte_order.cuh"
#include "codec/no_offsets.cuh"
#include "codec/scale_fragment.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/bits.cuh"

template <typename E>
struct E4m3;

template <>
struct E4m3<Half> : ByteOrder {
    typedef Half Element;
    static constexpr int STORED_POWER = 8;

    static __device__ __forceinline__ NoOffsets offsets() { return {}; }
    static __device__ __forceinline__ NoOffsets offsets(u32) { return {}; }
    // 2^-8 of the odd bytes' values.
    static __device__ __forceinline__ u32 widened(u32 bytes) {
        return (bytes & FAULT_SITE(e4m3_sign, 0x80008000u)) | (bytes >> 1 & FAULT_SITE(e4m3_mantissa, 0x3f803f80u));
    }
    static __device__ __forceinline__ void weights(const u32* words, u32 (&a)[4], NoOffsets, u32 scales) {
        dequantize(words, a, {});
        scale_fragment<Half>(a, scales);
    }
    static __device__ __forceinline__ void dequantize(const u32* words, u32 (&a)[4], NoOffsets) {
        a[0] = widened(words[0] << 8), a[1] = widened(words[1] << 8);
        a[2] = widened(words[0]), a[3] = widened(words[1]);
    }
};

template <>
struct E4m3<Bfloat16> : ByteOrder {
    typedef Bfloat16 Element;
    static constexpr int STORED_POWER = 0;
    static constexpr u32 UNIT = 0x7b807b80u;  // 2^120

    static __device__ __forceinline__ NoOffsets offsets() { return {}; }
    static __device__ __forceinline__ NoOffsets offsets(u32) { return {}; }
    // 2^-120 of the odd bytes' values.
    static __device__ __forceinline__ u32 widened(u32 bytes) {
        return (bytes & 0x80008000u) | (bytes >> 4 & 0x07f007f0u);
    }
    static __device__ __forceinline__ void raw(const u32* words, u32 (&a)[4]) {
        a[0] = widened(words[0] << 8), a[1] = widened(words[1] << 8);
        a[2] = widened(words[0]), a[3] = widened(words[1]);
    }
    static __device__ __forceinline__ void dequantize(const u32* words, u32 (&a)[4], NoOffsets) {
        raw(words, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = Bfloat16::multiply(a[i], FAULT_SITE(e4m3_bias, UNIT));
    }
    // The scales are multiplied by 2^120, once for all fragments of a quantisation group.
    static __device__ __forceinline__ void weights(const u32* words, u32 (&a)[4], NoOffsets, u32 scales) {
        raw(words, a);
        scale_fragment<Bfloat16>(a, Bfloat16::multiply(scales, UNIT));
    }
};
