// int4, the codec of 4-bit weights in Marlin's word order: from a stored word to operand A of the tensor cores.
//
// A word keeps nibbles 0..7 so that (nibble 0, nibble 4) are elements (0, 1) of the first register of an mma A fragment,
// (1, 5) of the third, (2, 6) of the second and (3, 7) of the fourth. With k the channels 2 (l%4) + {0, 1} of lane l:
//
//   register   nibbles   rows of A (columns of the weight)   columns of A (channels)
//   a[0]       0, 4      n                                   k
//   a[1]       2, 6      n + 8                               k
//   a[2]       1, 5      n                                   k + 8
//   a[3]       3, 7      n + 8                               k + 8
//
// There are five ways to dequantise, one file each. A kernel takes the one with the fewest instructions for it:
//
//   int4_differences.cuh   code minus zero point, exact; the scale multiplies the fragment or the sums
//   int4_codes.cuh         the code alone; the zero point comes to the sums of a quantisation group
//   int4_scaled.cuh        (code - 8) * scale in one instruction
//   int4_bytes.cuh         the code as an unsigned byte, for integer products
//   int4_e4m3.cuh          code minus 8 as FP8, for products with FP8 activations
//
// A codec is a type with an Element, so that kernels that are templates over the codec need not know the element.
#pragma once
#include "codec/lane_words.cuh"
#include "codec/int4_bytes.cuh"
#include "codec/int4_codes.cuh"
#include "codec/int4_differences.cuh"
#include "codec/int4_e4m3.cuh"
#include "codec/int4_scaled.cuh"

template <typename E>
struct Int4 : Int4Differences<E>, Int4Codes<E>, Int4Scaled<E>, Int4Bytes, Int4E4m3 {
    typedef E Element;
    static constexpr int BITS = 4, ROW_CHANNELS = 16, PLANES = 1, LANE_BYTES = 16, BLOCK_WORDS = 1, TILE_BYTES = 512, STORED_POWER = 0;
    static constexpr bool SPARSE = false, SUMS_CODES = true, FUSES = true;

    // A block has a single word.
    static __device__ __forceinline__ void dequantize(const u32* words, u32 (&a)[4], const Offsets& offsets) {
        Int4Differences<E>::dequantize(words[0], a, offsets);
    }
    static __device__ __forceinline__ void weights(const u32* words, u32 (&a)[4], const Offsets& offsets, u32 scales) {
        dequantize(words, a, offsets);
        scale_fragment<E>(a, scales);
    }

    // The zero points of symmetric weights, a pair of elements.
    static __device__ __forceinline__ u32 midpoints() { return E::narrow(8.f, 8.f); }
};
