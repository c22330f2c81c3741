// Nibbles as unsigned bytes, for integer products (mma/integer_digits.cuh).
//
// A word's nibbles stay where they are: bytes 0 and 2 are of column n, bytes 1 and 3 of column n + 8. Low nibbles are of
// channels 2 (l%4) + {0, 1}, high nibbles, which count 16 times as much, of the eight channels above.
#pragma once
#include "ptx/types.cuh"

struct Int4Bytes {
    // Operand A of an m16n8k32 from two words of a lane.
    static __device__ __forceinline__ void bytes(u32 first, u32 second, u32 (&a)[4]) {
        a[0] = first & 0x0f0f0f0fu, a[1] = second & 0x0f0f0f0fu;
        a[2] = first & 0xf0f0f0f0u, a[3] = second & 0xf0f0f0f0u;
    }
};
