// Messages: floats that blocks of the persistent kernel send each other.
//
// A message is a float in global memory whose lowest bit is the parity of the round in which it was written. A reader reads the word
// again until its bit is that of the expected round. So value and signal arrive in one trip through L2, without flags, fences or
// barriers of the grid. A word is written once a round. The kernel that runs before (persistent/prepare.cuh) sets all words to the
// round before the first.
//
// A float loses its last bit, 2^-24 of its size; one that was rounded to 16 bits loses nothing.
#pragma once
#include "ptx/bits.cuh"
#include "ptx/message.cuh"

// Turns of a wait after which the kernel gives up: they take seconds, a whole step takes a millisecond.
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

// COUNT vectors of N words that a lane has requested. All lanes of a warp request and wait together.
template <int COUNT, int N>
struct Letters {
    const float* from[COUNT];
    u32 words[COUNT][N];

    __device__ __forceinline__ void request(int i, const float* place) {
        from[i] = place;
        load_words(words[i], place);
    }
    // Marks vectors that a lane does not need.
    __device__ __forceinline__ void omit(int i, u32 round) {
        from[i] = nullptr;
#pragma unroll
        for (int n = 0; n < N; ++n) words[i][n] = round;
    }
    __device__ __forceinline__ bool is_stale(int i, u32 round) const {
        u32 differs = 0;
#pragma unroll
        for (int n = 0; n < N; ++n) differs |= words[i][n] ^ round;
        return differs & 1;
    }
    // Address of a message that has not arrived; `otherwise` if all have.
    __device__ __forceinline__ const float* missing(u32 round, const float* otherwise) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (is_stale(i, round)) otherwise = from[i];
        return otherwise;
    }
    __device__ __forceinline__ void request_missing(u32 round) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (is_stale(i, round)) load_words(words[i], from[i]);
    }
    __device__ __forceinline__ float value(int i, int n) const { return __uint_as_float(words[i][n] & ~1u); }
};

// Returns when all letters are of `round`. Every lane requests all its missing letters again: lanes have few, which do not saturate L2,
// and waiting for one word before requesting the others would take one trip more.
template <typename... SomeLetters>
__device__ __forceinline__ void await(u32 round, SomeLetters&... letters) {
    for (u32 turns = 0; turns < PATIENCE; ++turns) {
        const float* missing = nullptr;
        ((missing = letters.missing(round, missing)), ...);
        if (!__any_sync(0xffffffffu, missing != nullptr)) return;
        (letters.request_missing(round), ...);
    }
    trap();
}
