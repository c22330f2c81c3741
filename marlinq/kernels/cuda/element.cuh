// Arithmetic on pairs of 16-bit floats, float16 or bfloat16, held in 32-bit registers.
//
// Dequantisation. A Marlin word keeps nibbles 0..7 so that (nibble 0, nibble 4) are elements (0, 1) of the first
// register of an mma A fragment, (1, 5) of the third, (2, 6) of the second and (3, 7) of the fourth. A nibble
// becomes a float by OR-ing it under an exponent whose unit in the last place matches its bit position:
//   float16   0x6400 | n       = 1024 + n   (low nibbles),   0x5400 | (n << 4) = 64 + n   (high nibbles)
//   bfloat16  0x4300 | n       = 128 + n    (8 significant bits, so high nibbles are shifted down first)
// Subtracting that and the zero point, an integer up to 127 (float16: 1023), in 16 bits is exact.
//
// Codes. Where sums are scaled, zero points can be taken from sums too, and a code needs no subtraction of its own. As a
// subnormal float16 a nibble is a multiple of 2^-24, or of 2^-20 in the next four bits, and the tensor cores multiply those
// exactly; the two kinds go to sums of their own. A bfloat16 has no such small numbers whose products a float32 could hold,
// so its codes keep the 128 of their exponent, which leaves the sums with the zero points.
//
// Scaled codes. With zero points of 8 one fused instruction makes (code - 8) * scale of a nibble that is nothing but masked, a
// subnormal number of u times the code: factor * nibble + shift, where factor = scale / u and shift = -8 * scale. Both are
// scales times powers of two, so the only rounding is that of the product. For float16, u = 2^-24 or 2^-20, factors would
// leave the range of the type, so scales are multiplied by a power of two for every column, chosen by what is in it, to lie
// between 2 and 4, and below 16 until it is chosen anew: then factor = 2^12 * scale, and weights are 2^-12 of what they would
// be. A scale more than eight times smaller than its column's largest may yield subnormal weights, off by 2^-24 at most since
// shift and product are rounded, 2^-13 of that largest scale. bfloat16 has room: u = 2^-133 or 2^-129, weights are 2^-30 of
// what they would be, and scales from 2^25 on become infinite.
#pragma once
#include "ptx.cuh"

// Half h (0 or 1) of a pair, repeated in both halves.
template <int H>
__device__ __forceinline__ u32 broadcast(u32 pair) {
    u32 r;
    // As halves, which an instruction can take from where they are; prmt would be one of its own.
    if constexpr (H == 0) {
        asm("{ .reg .b16 l; .reg .b16 h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(r) : "r"(pair));
    } else {
        asm("{ .reg .b16 l; .reg .b16 h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(r) : "r"(pair));
    }
    return r;
}

// What a weight's nibble, under its exponent, exceeds the code minus the zero point by: pairs for low and for high nibbles,
// of rows n and n + 8.
struct Offsets {
    u32 low[2], high[2];
};

// What nibbles of the first and of the second kind are multiplied by, and what is added: pairs for rows n and n + 8.
struct Factors {
    u32 first, second, shift;
};

struct Half {
    static __device__ __forceinline__ u32 add(u32 a, u32 b) {
        u32 r;
        asm("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ u32 subtract(u32 a, u32 b) {
        u32 r;
        asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
        u32 r;
        asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ float widen(u32 bits) {
        float r;
        asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(bits));
        return r;
    }
    // Two floats to a pair, the first in the low half.
    static __device__ __forceinline__ u32 narrow(float low, float high) {
        u32 r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static __device__ __forceinline__ void multiply_accumulate(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    // For zero points of 8, and for a pair of others.
    static __device__ __forceinline__ Offsets offsets() {
        return {{0x64086408u, 0x64086408u}, {0x54805480u, 0x54805480u}};
    }
    static __device__ __forceinline__ Offsets offsets(u32 zeros) {
        const u32 first = broadcast<0>(zeros), second = broadcast<1>(zeros);
        return {{add(first, 0x64006400u), add(second, 0x64006400u)}, {add(first, 0x54005400u), add(second, 0x54005400u)}};
    }
    // Of a word: pairs of codes of channels 2 (l%4) + {0, 1} and of the eight above, of rows n and n + 8.
    static __device__ __forceinline__ void codes(u32 word, u32 (&pairs)[2][2]) {
        const u32 upper = word >> 8;
        pairs[0][0] = word & 0x000f000fu, pairs[0][1] = upper & 0x000f000fu;
        pairs[1][0] = word & 0x00f000f0u, pairs[1][1] = upper & 0x00f000f0u;
    }
    static constexpr int KINDS = 2;           // of codes, whose sums are kept apart
    static constexpr float SECOND = 0.0625f;  // what those of the second kind count
    static constexpr float UNIT = 16777216.f;  // what a sum of the first kind is multiplied by in the end
    static constexpr float BASE = 0.f;        // what is in a pair beside the code
    // Operands that sum activations alone: once, and as often as codes with a zero point of 8 hold too much of them.
    static constexpr u32 ONES_AS_CODES = 0x00010001u;
    static constexpr u32 EIGHTS_AS_CODES = 0x00080008u;
    // A word to the A fragment of codes minus zero points.
    static __device__ __forceinline__ void dequantize(u32 word, u32 (&a)[4], const Offsets& offsets) {
        const u32 upper = word >> 8;
        a[0] = subtract(and_or<0x000f000fu, 0x64006400u>(word), offsets.low[0]);
        a[2] = subtract(and_or<0x00f000f0u, 0x54005400u>(word), offsets.high[0]);
        a[1] = subtract(and_or<0x000f000fu, 0x64006400u>(upper), offsets.low[1]);
        a[3] = subtract(and_or<0x00f000f0u, 0x54005400u>(upper), offsets.high[1]);
    }

    static __device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
        u32 r;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
        return r;
    }
    // Whether scales need a power of two, a normalizer, for every column.
    static constexpr bool NORMALIZES = true;
    static constexpr u32 LARGEST_NORMALIZERS = 0x7c007c00u;  // larger than any
    // For a pair of columns the smaller of `known` and what brings their scales to 2 .. 4.
    static __device__ __forceinline__ u32 normalizers(u32 known, u32 scales) {
        const u32 low = 0x7c00u - max(scales & 0x7c00u, 0x400u), high = 0x7c00u - max(scales >> 16 & 0x7c00u, 0x400u);
        return min(known & 0xffffu, low) | min(known >> 16, high) << 16;
    }
    static __device__ __forceinline__ u32 normalize(u32 scales, u32 normalizers) { return multiply(scales, normalizers); }
    // Not zero if one of a pair has become 16 or more.
    static __device__ __forceinline__ u32 outgrown(u32 normalized) { return ((normalized & 0x7c007c00u) + 0x34003400u) & 0x80008000u; }
    static __device__ __forceinline__ Factors factors(u32 normalized) {
        return {multiply(normalized, 0x6c006c00u), multiply(normalized, 0x5c005c00u), multiply(normalized, 0x98009800u)};
    }
    // What sums of column h of a pair have to be multiplied by in the end, and if its normalizer changes.
    template <int H>
    static __device__ __forceinline__ float unit(u32 normalizers) {
        return __uint_as_float(154u - (H == 0 ? normalizers >> 10 & 31u : normalizers >> 26) << 23);
    }
    template <int H>
    static __device__ __forceinline__ float ratio(u32 now, u32 before) {
        return unit<H>(before) / unit<H>(now);
    }
};

struct Bfloat16 {
    static __device__ __forceinline__ u32 add(u32 a, u32 b) {
        // a * 1 + b: sm_80 has the fused instruction only.
        u32 r;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(ONES), "r"(b));
        return r;
    }
    static __device__ __forceinline__ u32 subtract(u32 a, u32 b) { return add(a, b ^ 0x80008000u); }
    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
        u32 r;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
        return r;
    }
    static __device__ __forceinline__ float widen(u32 bits) { return __uint_as_float(bits << 16); }
    static __device__ __forceinline__ u32 narrow(float low, float high) {
        u32 r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static __device__ __forceinline__ void multiply_accumulate(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ Offsets offsets() {
        return {{0x43084308u, 0x43084308u}, {0x43084308u, 0x43084308u}};
    }
    static __device__ __forceinline__ Offsets offsets(u32 zeros) {
        const u32 first = add(broadcast<0>(zeros), 0x43004300u), second = add(broadcast<1>(zeros), 0x43004300u);
        return {{first, second}, {first, second}};
    }
    static __device__ __forceinline__ void codes(u32 word, u32 (&pairs)[2][2]) {
        pairs[0][0] = and_or<0x000f000fu, 0x43004300u>(word), pairs[0][1] = and_or<0x000f000fu, 0x43004300u>(word >> 8);
        pairs[1][0] = and_or<0x000f000fu, 0x43004300u>(word >> 4), pairs[1][1] = and_or<0x000f000fu, 0x43004300u>(word >> 12);
    }
    static constexpr int KINDS = 1;
    static constexpr float SECOND = 1.f;
    static constexpr float UNIT = 1.f;
    static constexpr float BASE = 128.f;
    static constexpr u32 ONES_AS_CODES = 0x3f803f80u;
    static constexpr u32 EIGHTS_AS_CODES = 0x43084308u;  // the base and 8
    static __device__ __forceinline__ void dequantize(u32 word, u32 (&a)[4], const Offsets& offsets) {
        a[0] = subtract(and_or<0x000f000fu, 0x43004300u>(word), offsets.low[0]);
        a[2] = subtract(and_or<0x000f000fu, 0x43004300u>(word >> 4), offsets.high[0]);
        a[1] = subtract(and_or<0x000f000fu, 0x43004300u>(word >> 8), offsets.low[1]);
        a[3] = subtract(and_or<0x000f000fu, 0x43004300u>(word >> 12), offsets.high[1]);
    }
    static constexpr u32 ONES = 0x3f803f80u;

    static __device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
        u32 r;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
        return r;
    }
    static constexpr bool NORMALIZES = false;
    static constexpr u32 LARGEST_NORMALIZERS = 0;
    static __device__ __forceinline__ u32 normalizers(u32, u32) { return 0; }
    static __device__ __forceinline__ u32 normalize(u32 scales, u32) { return scales; }
    static __device__ __forceinline__ u32 outgrown(u32) { return 0; }
    static __device__ __forceinline__ Factors factors(u32 scales) {
        return {multiply(scales, 0x73007300u), multiply(scales, 0x71007100u), multiply(scales, 0xb200b200u)};
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

// A word to the A fragment of scaled codes minus 8.
template <typename E>
__device__ __forceinline__ void scaled_codes(u32 word, u32 (&a)[4], const Factors& factors) {
    const u32 upper = word >> 8;
    a[0] = E::multiply_add(word & 0x000f000fu, broadcast<0>(factors.first), broadcast<0>(factors.shift));
    a[2] = E::multiply_add(word & 0x00f000f0u, broadcast<0>(factors.second), broadcast<0>(factors.shift));
    a[1] = E::multiply_add(upper & 0x000f000fu, broadcast<1>(factors.first), broadcast<1>(factors.shift));
    a[3] = E::multiply_add(upper & 0x00f000f0u, broadcast<1>(factors.second), broadcast<1>(factors.shift));
}

template <typename E, int H>
__device__ __forceinline__ float widen_half(u32 pair) {
    return E::widen(H == 0 ? pair & 0xffffu : pair >> 16);
}

// Times the scales of rows n and n + 8.
template <typename E>
__device__ __forceinline__ void scale_fragment(u32 (&a)[4], u32 scales) {
    const u32 low = broadcast<0>(scales), high = broadcast<1>(scales);
    a[0] = E::multiply(a[0], low), a[2] = E::multiply(a[2], low);
    a[1] = E::multiply(a[1], high), a[3] = E::multiply(a[3], high);
}
