// 8-bit codes from the kernels' words (codec/byte_order.cuh) to a matrix [N, K] whose rows are channels in their order, as
// cuBLAS takes FP8 weights.
//
// A block has 64 columns of up to 128 channels, eight tiles one below the other. A thread takes four words of a tile; each is
// channels k, k + 1 and k + 8, k + 9 of a column, and goes to shared memory as two pairs. Rows leave it in 16 bytes a thread.
//
// Configuration: THREADS (256).
#pragma once
#include "fault_site.cuh"
#include "ptx/bits.cuh"
#include "ptx/types.cuh"

template <typename C>
__device__ __forceinline__ void make_plain(const uint4* __restrict__ words, uint4* __restrict__ plain, int K, int N) {
    constexpr int COLUMNS = 64, CHANNELS = 128, TILE_VECTORS = 64, PITCH = CHANNELS / 2 + 2;
    static_assert(C::THREADS == 256, "two vectors of words a thread, and of results");
    __shared__ u16 pairs[COLUMNS * PITCH];  // [column][pair of channels]; two more avoid bank conflicts
    const int columns = N / COLUMNS, tile_n = blockIdx.x % columns, k0 = blockIdx.x / columns * CHANNELS;
    const int rows = min(CHANNELS, K - k0) / 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int vector = threadIdx.x + i * C::THREADS, row = vector / TILE_VECTORS, at = vector % TILE_VECTORS;
        if (row >= rows) continue;
        const uint4 v = words[((i64)(k0 / 16 + row) * columns + tile_n) * TILE_VECTORS + at];
        const u32 four[4] = {v.x, v.y, v.z, v.w};
        const int lane = at % 32, n = 32 * (at / 32) + lane / 4, pair = 8 * row + lane % 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 ordered = permute_bytes<FAULT_SITE(plain_order, 0x3120u)>(four[j], four[j]);
            u16* const column = pairs + (n + 8 * j) * PITCH;
            column[pair] = (u16)ordered, column[pair + 4] = (u16)(ordered >> 16);
        }
    }
    FAULT_SITE(plain_pairs_there, __syncthreads();)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int vector = threadIdx.x + i * C::THREADS, column = vector / 8, part = vector % 8;
        if (part >= rows) continue;
        const u32* from = reinterpret_cast<const u32*>(pairs + column * PITCH) + 4 * part;
        plain[((i64)(tile_n * COLUMNS + column) * K + k0) / 16 + part] = make_uint4(from[0], from[1], from[2], from[3]);
    }
}

#define INSTANTIATE_PLAIN_BYTES(NAME, CONFIGURATION)                                      \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                  \
    NAME(const uint4* __restrict__ words, uint4* __restrict__ plain, int K, int N) {      \
        make_plain<CONFIGURATION>(words, plain, K, N);                                    \
    }
