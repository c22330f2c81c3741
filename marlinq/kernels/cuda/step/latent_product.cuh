// Products of latent attention with a small weight of each head: 8 rows by 16 OUTS columns a block, on tensor cores.
//
//   d (16 outputs x 8 rows) += W (16 x 32 channels) X^T      a lane's 16 bytes are 8 neighbouring channels of one row, for W
//                                                            and X alike, so both come straight from memory
//
// Warp (out, part) takes outputs 16 out .. of the block and every PARTS-th chunk of 32 channels. Weights are requested before the
// previous kernel has ended. Sums of the parts meet in shared memory.
//
// Members of the configuration that it reads: Element, IN (channels that are summed over, a multiple of 32), OUT (a multiple of 16 OUTS).
#pragma once
#include "ptx/launch.cuh"
#include "step/rows.cuh"

constexpr int LATENT_ROWS = 8, LATENT_OUTS = 2, LATENT_PARTS = 4, LATENT_THREADS = 32 * LATENT_OUTS * LATENT_PARTS;

// Sums of each part: [output][row].
struct LatentSums {
    float of[LATENT_PARTS][16 * LATENT_OUTS][LATENT_ROWS + 1];
};

template <typename C>
struct LatentProduct {
    typedef typename C::Element E;
    static constexpr int CHUNKS = C::IN / 32, MINE = (CHUNKS + LATENT_PARTS - 1) / LATENT_PARTS, COLUMNS = 16 * LATENT_OUTS;
    static constexpr int TILES = C::OUT / COLUMNS;  // blocks of a head
    static_assert(C::IN % 32 == 0 && C::OUT % COLUMNS == 0, "whole chunks and tiles");

    uint4 w[MINE][2];
    int u, v, out, part;

    // `weight` is [OUT, IN], `first` the block's first output.
    __device__ __forceinline__ LatentProduct(const u16* weight, int first) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u = lane / 4, v = lane % 4, out = warp / LATENT_PARTS, part = warp % LATENT_PARTS;
        const u16* from = weight + (i64)(first + 16 * out + u) * C::IN + 8 * v;
#pragma unroll
        for (int i = 0; i < MINE; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int chunk = part + i * LATENT_PARTS;
                w[i][h] = chunk < CHUNKS ? load_cached(from + 8 * h * C::IN + 32 * chunk) : make_uint4(0, 0, 0, 0);
            }
    }

    // load(chunk) gives channels 32 chunk + 8 v .. of row u.
    template <typename Load>
    __device__ __forceinline__ void multiply(LatentSums& sums, Load load) const {
        float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int chunk = part + i * LATENT_PARTS;
            if (chunk >= CHUNKS) continue;
            const uint4 x = load(chunk);
            const u32 low[4] = {w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y};
            const u32 high[4] = {w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w};
            E::multiply_accumulate(d, low, x.x, x.y);
            E::multiply_accumulate(d, high, x.z, x.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.of[part][16 * out + u + 8 * (i / 2)][2 * v + i % 2] = d[i];
    }

    // Called by the whole block. store(row, column, pair) gets two neighbouring outputs of a row.
    template <typename Store>
    static __device__ __forceinline__ void finish(const LatentSums& sums, Store store) {
        FAULT_SITE(latent_sums_there, __syncthreads();)
        for (int i = threadIdx.x; i < LATENT_ROWS * COLUMNS / 2; i += LATENT_THREADS) {
            const int row = i / (COLUMNS / 2), column = i % (COLUMNS / 2) * 2;
            float low = 0.f, high = 0.f;
#pragma unroll
            for (int part = 0; part < LATENT_PARTS; ++part) {
                low += sums.of[part][column][row];
                high += sums.of[part][column + 1][row];
            }
            store(row, column, E::narrow(low, high));
        }
    }
};
