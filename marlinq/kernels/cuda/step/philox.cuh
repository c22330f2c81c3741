// Random numbers by counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#pragma once
#include "ptx/types.cuh"

// Four neighbouring tokens share a counter, so their numbers are computed together and kept for the next calls.
struct Philox {
    u32 key[2], words[4];
    int four = -1;

    __device__ __forceinline__ Philox(u64 seed) : key{static_cast<u32>(seed), static_cast<u32>(seed >> 32)} {}

    // Gumbel noise of a token in draw number `draw`: -log(E) with E exponential, made of 32 random bits v as
    // -log1p(-v).
    __device__ __forceinline__ float noise(int token, u32 draw, u32 stream) {
        if (token / 4 != four) fill(four = token / 4, draw, stream);
        const int place = token % 4;
        const u32 word = place < 2 ? (place == 0 ? words[0] : words[1]) : (place == 2 ? words[2] : words[3]);
        const float uniform = fminf(static_cast<float>(word) * 0x1p-32f + 0x1p-33f, 1.f - 0x1p-24f);
        return -logf(-log1pf(-uniform));
    }

private:
    __device__ __forceinline__ void fill(u32 a, u32 b, u32 c) {
        u32 d = 0, first = key[0], second = key[1];
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const u64 left = static_cast<u64>(a) * 0xd2511f53u, right = static_cast<u64>(c) * 0xcd9e8d57u;
            a = static_cast<u32>(right >> 32) ^ b ^ first, b = static_cast<u32>(right);
            c = static_cast<u32>(left >> 32) ^ d ^ second, d = static_cast<u32>(left);
            first += 0x9e3779b9u, second += 0xbb67ae85u;
        }
        words[0] = a, words[1] = b, words[2] = c, words[3] = d;
    }
};
