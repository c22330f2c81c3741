// e2m1, the codec of FP4 weights with a sign, two bits of exponent and one of mantissa, in the words and nibbles of int4
// (codec/int4.cuh).
//
// Sign, exponent and mantissa go to their places in the wider format as they are, subnormals included. Only the bias of the
// exponent differs:
//
//   float16    bias 15 instead of 1: 2^-14 of the value, which the stored scales make up for
//   bfloat16   bias 127: 2^-126 of the value, whose products a float32 could not hold; one exact product with 2^126 undoes it
#pragma once
#include "fault_site.cuh"
#include "codec/lane_words.cuh"
#include "codec/no_offsets.cuh"
#include "codec/scale_fragment.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"

// Nibbles 3 - P and 7 - P of a word, whose lower three bits end at bit LAST of each half.
template <int P, int LAST>
__device__ __forceinline__ u32 widen_nibbles(u32 word) {
    constexpr int LEFT = 4 * P, RIGHT = 12 - LAST - LEFT;
    const u32 placed = RIGHT > 0 ? word >> (RIGHT > 0 ? RIGHT : 0) : word << (RIGHT > 0 ? 0 : -RIGHT);
    return (word << LEFT & FAULT_SITE(e2m1_sign, 0x80008000u)) | (placed & 0x00070007u << LAST);
}

struct E2m1Order {
    static constexpr int BITS = 4, PLANES = 1, BLOCK_WORDS = 1, TILE_BYTES = PLANES * PLANE_BYTES;
    static constexpr bool SUMS_CODES = false, FUSES = false, NORMALIZES = false;

    static __device__ __forceinline__ NoOffsets offsets() { return {}; }
    static __device__ __forceinline__ NoOffsets offsets(u32) { return {}; }

protected:
    template <int LAST>
    static __device__ __forceinline__ void widen(u32 word, u32 (&a)[4]) {
        a[0] = widen_nibbles<3, LAST>(word), a[2] = widen_nibbles<2, LAST>(word);
        a[1] = widen_nibbles<1, LAST>(word), a[3] = widen_nibbles<0, LAST>(word);
    }
};

template <typename E>
struct E2m1;

template <>
struct E2m1<Half> : E2m1Order {
    typedef Half Element;
    static constexpr int STORED_POWER = 14;

    static __device__ __forceinline__ void dequantize(const u32* words, u32 (&a)[4], NoOffsets) {
        widen<FAULT_SITE(e2m1_place, 9)>(words[0], a);
    }
    static __device__ __forceinline__ void weights(const u32* words, u32 (&a)[4], NoOffsets, u32 scales) {
        dequantize(words, a, {});
        scale_fragment<Half>(a, scales);
    }
};

template <>
struct E2m1<Bfloat16> : E2m1Order {
    typedef Bfloat16 Element;
    static constexpr int STORED_POWER = 0;
    static constexpr u32 UNIT = 0x7e807e80u;  // 2^126

    static __device__ __forceinline__ void dequantize(const u32* words, u32 (&a)[4], NoOffsets) {
        widen<6>(words[0], a);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = Bfloat16::multiply(a[i], FAULT_SITE(e2m1_bias, UNIT));
    }
    // Scales take the power of two along, once for all fragments of a quantisation group.
    static __device__ __forceinline__ void weights(const u32* words, u32 (&a)[4], NoOffsets, u32 scales) {
        widen<6>(words[0], a);
        scale_fragment<Bfloat16>(a, Bfloat16::multiply(scales, UNIT));
    }
};
