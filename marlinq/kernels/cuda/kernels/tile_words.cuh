// Marlin words from the words of another layout: the same 4-bit codes in another order.
//
//   slot i of word 4t + q of tile (kt, nt) = code of channel k, column n;  j = {0, 2, 4, 6, 1, 3, 5, 7}[i]
//       k = 16 kt + 2 (t % 4) + {0, 1, 8, 9}[j % 4]        n = 64 nt + 16 q + t / 4 + 8 (j / 4)
//
//   source                       word           slot
//   ALONG_K                      [k / 8][n]     k % 8
//   ALONG_K_TRANSPOSED           [n][k / 8]     k % 8
//   ALONG_N_INTERLEAVED          [k][n / 8]     {0, 4, 1, 5, 2, 6, 3, 7}[n % 8]
//
// A block writes a tile, a thread a word. A tile reads few neighbouring bytes of each of its rows, so successive blocks continue in
// the same rows, while their cache lines are still cached.
//
// Configuration: THREADS (128, the words of a tile), SOURCE.
#pragma once
#include "ptx/types.cuh"

enum class Source { ALONG_K, ALONG_K_TRANSPOSED, ALONG_N_INTERLEAVED };

template <Source SOURCE>
__device__ __forceinline__ u32 code_of(const u32* __restrict__ words, int k, int n, int K, int N) {
    if constexpr (SOURCE == Source::ALONG_K) return words[(i64)(k / 8) * N + n] >> 4 * (k % 8) & 15;
    if constexpr (SOURCE == Source::ALONG_K_TRANSPOSED) return words[(i64)n * (K / 8) + k / 8] >> 4 * (k % 8) & 15;
    const int slot = (n % 8 >> 1) + (n % 2) * 4;
    return words[(i64)k * (N / 8) + n / 8] >> 4 * slot & 15;
}

template <typename C>
__device__ __forceinline__ void make_tile(const u32* __restrict__ words, u32* __restrict__ tiles, int K, int N) {
    static_assert(C::THREADS == 128, "a tile has 128 words");
    const int rows = K / 16, columns = N / 64, block = blockIdx.x;
    const bool down = C::SOURCE == Source::ALONG_K_TRANSPOSED;
    const int row = down ? block % rows : block / columns, column = down ? block / rows : block % columns;
    const int t = threadIdx.x / 4, q = threadIdx.x % 4;
    const int k = 16 * row + 2 * (t % 4), n = 64 * column + 16 * q + t / 4;
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int j = i < 4 ? 2 * i : 2 * i - 7;
        const int channel = k + j % 2 + j % 4 / 2 * 8, out = n + j / 4 * 8;
        word |= code_of<C::SOURCE>(words, channel, out, K, N) << 4 * i;
    }
    tiles[((i64)row * columns + column) * C::THREADS + threadIdx.x] = word;
}

#define INSTANTIATE_TILE_WORDS(NAME, CONFIGURATION)                                                                 \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                                            \
    NAME(const u32* __restrict__ words, u32* __restrict__ tiles, int K, int N) {                                    \
        make_tile<CONFIGURATION>(words, tiles, K, N);                                                              \
    }
