// int8, the codec of unsigned bytes with zero points, 128 for symmetric weights (codec/byte_order.cuh).
//
// float16: a byte under an exponent whose unit in the last place is 2^-8 is 4 + code / 256. The difference to 4 + zero / 256 is
// exact, and scales are stored times 2^8, so small ones are not subnormal.
// bfloat16 has eight significant bits. The lower seven bits l and the highest bit h of a code are two numbers, 128 + l and
// 128 + 128 h. With the highest bit inverted, their difference is code - 128, exact; so is that less the zero point's
// distance from 128.
#pragma once
#include "fault_site.cuh"
#include "codec/byte_order.cuh"
#include "codec/scale_fragment.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/bits.cuh"

// Numbers subtracted from rows n and n + 8: pairs.
struct ByteOffsets {
    u32 of[2];
};

template <typename E>
struct Int8;

template <>
struct Int8<Half> : ByteOrder {
    typedef Half Element;
    static constexpr int STORED_POWER = 8;

    // For zero points of 128.
    static __device__ __forceinline__ ByteOffsets offsets() { return {{0x44804480u, 0x44804480u}}; }
    // For the zero points of rows n and n + 8, a pair.
    static __device__ __forceinline__ ByteOffsets offsets(u32 zeros) {
        constexpr u32 UNIT = 0x1c001c00u, BASE = 0x44004400u;  // 2^-8 and 4
        return {{Half::multiply_add(broadcast<0>(zeros), UNIT, BASE),
                 Half::multiply_add(broadcast<1>(zeros), UNIT, FAULT_SITE(int8_zero_base, BASE))}};
    }
    static __device__ __forceinline__ void weights(const u32* words, u32 (&a)[4], const ByteOffsets& offsets, u32 scales) {
        dequantize(words, a, offsets);
        scale_fragment<Half>(a, scales);
    }
    static __device__ __forceinline__ void dequantize(const u32* words, u32 (&a)[4], const ByteOffsets& offsets) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = Half::subtract(and_or<0x00ff00ffu, 0x44004400u>(words[h]), offsets.of[h]);
            a[h + 2] = Half::subtract(and_or<0x00ff00ffu, 0x44004400u>(FAULT_SITE(int8_odd_bytes, words[h] >> 8)), offsets.of[h]);
        }
    }
};

template <>
struct Int8<Bfloat16> : ByteOrder {
    typedef Bfloat16 Element;
    static constexpr int STORED_POWER = 0;

    static __device__ __forceinline__ ByteOffsets offsets() { return {{0, 0}}; }
    static __device__ __forceinline__ ByteOffsets offsets(u32 zeros) {
        constexpr u32 MIDDLE = 0x43004300u;  // 128
        return {{Bfloat16::subtract(broadcast<0>(zeros), MIDDLE), Bfloat16::subtract(broadcast<1>(zeros), MIDDLE)}};
    }
    // Code - 128 of the even bytes.
    static __device__ __forceinline__ u32 centred(u32 bytes) {
        const u32 highest = FAULT_SITE(int8_highest_bit, (~bytes & 0x00800080u)) | 0x43004300u;
        return Bfloat16::subtract(and_or<0x007f007fu, 0x43004300u>(bytes), highest);
    }
    static __device__ __forceinline__ void weights(const u32* words, u32 (&a)[4], const ByteOffsets& offsets, u32 scales) {
        dequantize(words, a, offsets);
        scale_fragment<Bfloat16>(a, scales);
    }
    static __device__ __forceinline__ void dequantize(const u32* words, u32 (&a)[4], const ByteOffsets& offsets) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = centred(words[h]), a[h + 2] = centred(words[h] >> 8);
            // Zero for symmetric weights: the compiler then removes the subtraction.
            if (offsets.of[h] != 0)
                a[h] = Bfloat16::subtract(a[h], offsets.of[h]), a[h + 2] = Bfloat16::subtract(a[h + 2], offsets.of[h]);
        }
    }
};
