// int4 to the code alone, without a subtraction: zero points are subtracted from the sums of a quantisation group.
//
// float16: a masked nibble is a subnormal number, 2^-24 times the code, or 2^-20 times the code in the next four bits. The tensor
// cores multiply subnormal numbers exactly. The two kinds of codes have separate sums.
// bfloat16: products of subnormal numbers would underflow float32, so a code is 128 + code (the base), and the base is subtracted
// from the sums together with the zero points.
#pragma once
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/bits.cuh"

template <typename E>
struct Int4Codes;

template <>
struct Int4Codes<Half> {
    static constexpr int KINDS = 2;            // kinds of codes, with separate sums
    static constexpr float SECOND = 0.0625f;   // factor of the second kind's sums
    static constexpr float UNIT = 16777216.f;  // factor of the first kind's sums
    static constexpr float BASE = 0.f;         // number that an operand contains beside the code
    // Operands A whose products sum the activations: times 1, and times base + 8, the excess of symmetric codes.
    static constexpr u32 ONES_AS_CODES = 0x00010001u;
    static constexpr u32 EIGHTS_AS_CODES = 0x00080008u;

    // Pairs of codes of channels 2 (l%4) + {0, 1} and of the eight above, each of rows n and n + 8.
    static __device__ __forceinline__ void codes(u32 word, u32 (&pairs)[2][2]) {
        const u32 upper = word >> 8;
        pairs[0][0] = word & 0x000f000fu, pairs[0][1] = upper & 0x000f000fu;
        pairs[1][0] = word & 0x00f000f0u, pairs[1][1] = upper & 0x00f000f0u;
    }
};

template <>
struct Int4Codes<Bfloat16> {
    static constexpr int KINDS = 1;
    static constexpr float SECOND = 1.f;
    static constexpr float UNIT = 1.f;
    static constexpr float BASE = 128.f;
    static constexpr u32 ONES_AS_CODES = 0x3f803f80u;
    static constexpr u32 EIGHTS_AS_CODES = 0x43084308u;  // the base and 8

    static __device__ __forceinline__ void codes(u32 word, u32 (&pairs)[2][2]) {
        pairs[0][0] = and_or<0x000f000fu, 0x43004300u>(word), pairs[0][1] = and_or<0x000f000fu, 0x43004300u>(word >> 8);
        pairs[1][0] = and_or<0x000f000fu, 0x43004300u>(word >> 4), pairs[1][1] = and_or<0x000f000fu, 0x43004300u>(word >> 12);
    }
};
