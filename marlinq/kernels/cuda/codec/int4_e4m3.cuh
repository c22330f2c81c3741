// int4 as FP8: code minus 8, in units of 2^-9, as the bytes of operand A of an m64n<N>k32 product of E4M3.
//
// E4M3 below 2^-5 counts in steps of 2^-9: a magnitude of 0 to 8 is its own byte, to which the sign is added. So no table
// is needed, and the unit is a power of two that multiplies the sums.
//
// A word of the stored layout has four channels of each of its two columns. Two words, of rows i and i + 1, are a fragment. So channels
// come in the order of the table, in which activations must lie, too (FRAGMENTS of kernels/quantize_rows.cuh).
//
//   register   columns of the weight   channels of lane l (k = 2 (l%4))
//   a[0]       n                       k, k + 1, k + 8, k + 9 of the first word's row
//   a[1]       n + 8                   the same
//   a[2]       n                       the same of the second word's row
//   a[3]       n + 8                   the same
#pragma once
#include "fault_site.cuh"
#include "ptx/bits.cuh"

struct Int4E4m3 {
    static constexpr float E4M3_UNITS = 512.f;  // units of 2^-9 in 1

    // Bytes of code - 8: its magnitude, with its sign as highest bit. `codes` has codes in the low nibbles of bytes; the highest bits of
    // the bytes of `signs` are those of the codes, set where code - 8 is not negative.
    static __device__ __forceinline__ u32 signed_magnitudes(u32 codes, u32 signs) {
        return without_or<0x80808080u>(byte_distances(codes & 0x0f0f0f0fu, 0x08080808u), signs);
    }
    static __device__ __forceinline__ void e4m3_word(u32 word, u32& first, u32& second) {
        const u32 low = signed_magnitudes(word, word << 4), high = signed_magnitudes(word >> 4, word);
        first = permute_bytes<FAULT_SITE(e4m3_channels, 0x6420u)>(low, high);
        second = permute_bytes<0x7531u>(low, high);
    }
    static __device__ __forceinline__ void e4m3(u32 first, u32 second, u32 (&a)[4]) {
        e4m3_word(first, a[0], a[1]);
        e4m3_word(second, a[2], a[3]);
    }
};
