// int4 to code minus zero point, exactly.
//
// A nibble becomes a float when it is OR-ed under an exponent whose unit in the last place has the weight of its lowest bit:
//
//   float16    0x6400 | n = 1024 + n (low nibbles)    0x5400 | (n << 4) = 64 + n (high nibbles)
//   bfloat16   0x4300 | n = 128 + n (8 significant bits, so high nibbles are shifted down first)
//
// The subtraction of that base and of the zero point, an integer up to 127 (float16: 1023), is exact in 16 bits.
#pragma once
#include "fault_site.cuh"
#include "codec/scale_fragment.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/bits.cuh"

// Base plus zero point: pairs for low and for high nibbles, of rows n and n + 8.
struct Offsets {
    u32 low[2], high[2];
};

template <typename E>
struct Int4Differences;

template <>
struct Int4Differences<Half> {
    // For zero points of 8.
    static __device__ __forceinline__ Offsets offsets() {
        return {{0x64086408u, 0x64086408u}, {0x54805480u, 0x54805480u}};
    }
    // For the zero points of rows n and n + 8, a pair of elements.
    static __device__ __forceinline__ Offsets offsets(u32 zeros) {
        const u32 first = broadcast<0>(zeros), second = broadcast<1>(zeros);
        return {{Half::add(first, FAULT_SITE(difference_base, 0x64006400u)), Half::add(second, 0x64006400u)},
                {Half::add(first, 0x54005400u), Half::add(second, 0x54005400u)}};
    }
    static __device__ __forceinline__ void dequantize(u32 word, u32 (&a)[4], const Offsets& offsets) {
        const u32 upper = word >> 8;
        a[0] = Half::subtract(and_or<0x000f000fu, 0x64006400u>(word), offsets.low[0]);
        a[2] = Half::subtract(and_or<0x00f000f0u, 0x54005400u>(word), offsets.high[0]);
        a[1] = Half::subtract(and_or<0x000f000fu, 0x64006400u>(upper), offsets.low[1]);
        a[3] = Half::subtract(and_or<0x00f000f0u, 0x54005400u>(upper), offsets.high[1]);
    }
};

template <>
struct Int4Differences<Bfloat16> {
    static __device__ __forceinline__ Offsets offsets() {
        return {{0x43084308u, 0x43084308u}, {0x43084308u, 0x43084308u}};
    }
    static __device__ __forceinline__ Offsets offsets(u32 zeros) {
        const u32 first = Bfloat16::add(broadcast<0>(zeros), 0x43004300u);
        const u32 second = Bfloat16::add(broadcast<1>(zeros), 0x43004300u);
        return {{first, second}, {first, second}};
    }
    static __device__ __forceinline__ void dequantize(u32 word, u32 (&a)[4], const Offsets& offsets) {
        a[0] = Bfloat16::subtract(and_or<0x000f000fu, 0x43004300u>(word), offsets.low[0]);
        a[2] = Bfloat16::subtract(and_or<0x000f000fu, 0x43004300u>(word >> 4), offsets.high[0]);
        a[1] = Bfloat16::subtract(and_or<0x000f000fu, 0x43004300u>(word >> 8), offsets.low[1]);
        a[3] = Bfloat16::subtract(and_or<0x000f000fu, 0x43004300u>(word >> 12), offsets.high[1]);
    }
};
