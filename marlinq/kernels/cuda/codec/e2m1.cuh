// e2m1, the codec of FP4 weights with a sign, two bits of exponent and one of mantissa.
//
// A lane's word of a 16 x 16 block has codes 0..7, those of operand A's registers: codes 2r, 2r + 1 are the halves of a[r]
// (codec/int4.cuh has their rows and channels). Magnitudes are nibbles, signs fill the nibbles' highest bits so that each is one
// step from the byte that it goes to:
//
//   bits 4j .. 4j + 2    magnitude of code j
//   bit 8j + 7           sign of code j,     j < 4
//   bit 8j + 3           sign of code j + 4
//
// One permute looks four magnitudes up in a table of eight bytes, so a word takes eleven instructions in float16, whose low
// bytes are zeros, and thirteen in bfloat16. float16 gets 2^-14 of the value, which the stored scales make up for.
#pragma once
#include "fault_site.cuh"
#include "codec/lane_words.cuh"
#include "codec/no_offsets.cuh"
#include "codec/scale_fragment.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/bits.cuh"

// Bytes of the eight magnitudes 0, 1/2, 1, 3/2, 2, 3, 4, 6 as an element: the high bytes, and the low bytes unless all are zero.
template <typename E>
struct E2m1Bytes;

template <>
struct E2m1Bytes<Half> {
    static constexpr u32 HIGH[2] = {0x06040200u, 0x0e0c0a08u};
    static constexpr bool LOW_BYTES = false;
    static constexpr u32 LOW[2] = {0, 0};
    static constexpr int STORED_POWER = 14;
};

template <>
struct E2m1Bytes<Bfloat16> {
    static constexpr u32 HIGH[2] = {0x3f3f3f00u, 0x40404040u};
    static constexpr bool LOW_BYTES = true;
    static constexpr u32 LOW[2] = {0xc0800000u, 0xc0804000u};
    static constexpr int STORED_POWER = 0;
};

template <typename E>
struct E2m1 {
    typedef E Element;
    typedef E2m1Bytes<E> Bytes;
    static constexpr int BITS = 4, ROW_CHANNELS = 16, PLANES = 1, LANE_BYTES = 16, BLOCK_WORDS = 1, TILE_BYTES = 512;
    static constexpr bool SPARSE = false, SUMS_CODES = false, FUSES = false, NORMALIZES = false;
    static constexpr int STORED_POWER = Bytes::STORED_POWER;

    static __device__ __forceinline__ NoOffsets offsets() { return {}; }
    static __device__ __forceinline__ NoOffsets offsets(u32) { return {}; }

    // Two registers from four magnitudes, the nibbles at the low end of `nibbles`, and signs in the bytes' highest bits.
    static __device__ __forceinline__ void widen(u32 nibbles, u32 signs, u32& first, u32& second) {
        const u32 high = permute_bytes(Bytes::HIGH[0], Bytes::HIGH[1], nibbles) | (signs & FAULT_SITE(e2m1_sign, 0x80808080u));
        const u32 low = Bytes::LOW_BYTES ? permute_bytes(Bytes::LOW[0], Bytes::LOW[1], nibbles) : 0;
        first = permute_bytes<FAULT_SITE(e2m1_place, 0x5140u)>(low, high);
        second = permute_bytes<0x7362u>(low, high);
    }
    static __device__ __forceinline__ void dequantize(const u32* words, u32 (&a)[4], NoOffsets) {
        const u32 nibbles = words[0] & 0x77777777u;
        widen(nibbles, words[0], a[0], a[1]);
        widen(FAULT_SITE(e2m1_upper, nibbles >> 16), words[0] << 4, a[2], a[3]);
    }
    static __device__ __forceinline__ void weights(const u32* words, u32 (&a)[4], NoOffsets, u32 scales) {
        dequantize(words, a, {});
        scale_fragment<E>(a, scales);
    }
};
