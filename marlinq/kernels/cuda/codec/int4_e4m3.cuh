// int4 as FP8: the code, 0 to 15, in units of 2^-9, as the bytes of operand A of an m64n<N>k32 product of E4M3.
//
// E4M3 below 2^-5 counts in steps of 2^-9, so a code is its own byte, and the unit is a power of two that multiplies the sums. That
// codes are 8 too large is made up for by the sums of the activations (mma/fp8_loop.cuh).
//
// A word of the stored layout has four channels of each of its two columns. Two words, of rows i and i + 1, are a fragment; the
// channels of 32 are then in another order, which activations must have, too: 0, 1, 16, 17, 2, 3, 18, 19, ... 22, 23, then 8, 9, 24, 25, ...
//
//   register   columns of the weight   channels of lane l (k = 2 (l%4))
//   a[0]       n                       k, k + 1 of the first word's row, then of the second's
//   a[1]       n + 8                   the same
//   a[2]       n                       k + 8, k + 9 of the first word's row, then of the second's
//   a[3]       n + 8                   the same
#pragma once
#include "fault_site.cuh"
#include "ptx/bits.cuh"

struct Int4E4m3 {
    static constexpr float E4M3_UNITS = 512.f;  // of 1

    static __device__ __forceinline__ void e4m3(u32 first, u32 second, u32 (&a)[4]) {
        const u32 n = permute_bytes<FAULT_SITE(e4m3_channels, 0x6420u)>(first, second), n8 = permute_bytes<0x7531u>(first, second);
        a[0] = n & 0x0f0f0f0fu, a[1] = n8 & 0x0f0f0f0fu;
        a[2] = n >> 4 & 0x0f0f0f0fu, a[3] = n8 >> 4 & 0x0f0f0f0fu;
    }
};
