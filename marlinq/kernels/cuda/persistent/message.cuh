// Messages: how blocks of the persistent kernel hand numbers to each other.
//
// A message is a float in global memory whose lowest bit says in which round it was written. Rounds alternate, so whoever
// expects a round reads the word again until its bit is right. The number and the news of it travel together, in one trip
// through L2: there are no flags, no fences and no barriers of the grid. A word is written once a round. The kernel
// that runs before (persistent/prepare.cuh) sets all words to the round before the first.
//
// A float loses its last bit, 2^-24 of its size; one that was rounded to 16 bits loses nothing.
#pragma once
#include "persistent/lab.cuh"
#include "ptx/message.cuh"

// Turns of waiting after which something must be wrong: seconds, where a step takes a millisecond.
constexpr u32 PATIENCE = 1u << 23;

__device__ __forceinline__ void send(float* to, float value, u32 round) {
    store_word(to, (__float_as_uint(value) & ~1u) | (round & 1));
}

__device__ __forceinline__ void send(float* to, const float (&values)[4], u32 round) {
    u32 words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) words[n] = (__float_as_uint(values[n]) & ~1u) | (round & 1);
    store_words(to, words);
}

// COUNT vectors of N words, on their way.
template <int COUNT, int N>
struct Letters {
    const float* from[COUNT];
    u32 words[COUNT][N];

    __device__ __forceinline__ void request(int i, const float* place) {
        from[i] = place;
        load_words(words[i], place);
    }
    // Until all are of the round. Who waits requests all of them again, so that it waits for one trip behind the last.
    __device__ __forceinline__ void await(u32 round, float (&values)[COUNT][N]) {
        for (u32 turns = 0;; ++turns) {
            u32 differs = 0;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int n = 0; n < N; ++n) differs |= words[i][n] ^ round;
            if ((differs & 1) == 0 || LAB_NO_WAIT) break;
            if (turns == PATIENCE) trap();
#pragma unroll
            for (int i = 0; i < COUNT; ++i) load_words(words[i], from[i]);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int n = 0; n < N; ++n) values[i][n] = __uint_as_float(words[i][n] & ~1u);
    }
};
