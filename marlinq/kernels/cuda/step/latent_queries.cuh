// New tokens of latent attention: queries that absorb the keys' half of the expansion, and rows of the cache.
//
//   queries[m, h] = (q_plain[m, h] K_h, turned(q_rotated[m, h]))      K_h is [N, L], stored as [L, N]
//   cache[b, position] = (norm(latent[m]), turned(key[m]))
//
// A block takes 8 rows of a head and some of the L columns (step/latent_product.cuh); the first of a head rotates what is not
// absorbed. Behind those blocks are as many as there are rows, which each append a row to the cache.
//
// Row m belongs to sequence m, or all to sequence 0 where `sequences` is 1 (neighbouring tokens); its position is lengths[m].
//
// Configuration: Element, IN (N), OUT (L), ROTATED (channels, all rotated), INTERLEAVED, NORM (of the latent).
#pragma once
#include "fault_site.cuh"
#include "ptx/approximate.cuh"
#include "step/latent_product.cuh"

// Mirrored in kernels/step/latent.py.
struct LatentQueries {
    const u16 *q, *latent, *weight, *norm;
    const float2* table;
    u16 *out, *cache;
    const int* lengths;
    i64 q_stride, latent_stride;
    int rows, heads, sequences, capacity;
    float eps, offset;
};

// Pair `pair` of the rotated channels at `from`, turned, to the same channels at `to`.
template <typename C>
__device__ __forceinline__ void turn_pair(const float2* table, int position, const u16* from, u16* to, int pair) {
    typedef typename C::Element E;
    const int first = C::INTERLEAVED ? 2 * pair : pair, second = C::INTERLEAVED ? first + 1 : pair + C::ROTATED / 2;
    const float2 angle = table[(i64)position * (C::ROTATED / 2) + pair];
    const float a = E::widen(load_scalar(from + first)), b = E::widen(load_scalar(from + second));
    to[first] = (u16)E::narrow(a * angle.x - b * angle.y, 0.f);
    to[second] = (u16)E::narrow(b * angle.x + a * angle.y, 0.f);
}

template <typename C>
__device__ __forceinline__ void append_latent(const LatentQueries& given, i64 m) {
    typedef typename C::Element E;
    constexpr int WARPS = LATENT_THREADS / 32, VALUES = (C::OUT + LATENT_THREADS - 1) / LATENT_THREADS;
    __shared__ float squares[WARPS];
    const int position = load_scalar(given.lengths + m);
    wait_for_previous_kernel();
    const u16* latent = given.latent + m * given.latent_stride;
    float x[VALUES], square = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int channel = threadIdx.x + i * LATENT_THREADS;
        x[i] = channel < C::OUT ? E::widen(load_scalar(latent + channel)) : 0.f;
        square += x[i] * x[i];
    }
    const float factor = fast_reciprocal_root(block_sum(square, squares) / C::OUT + given.eps);
    // Tokens beyond the cache's capacity are dropped; callers check lengths before.
    if (position >= given.capacity) return;
    u16* row = given.cache + ((given.sequences == 1 ? 0 : m) * given.capacity + position) * (C::OUT + C::ROTATED);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int channel = threadIdx.x + i * LATENT_THREADS;
        if (channel >= C::OUT) continue;
        float y = x[i] * factor;
        if (C::NORM == Norm::RMS) y = rounded<E>(y);
        row[channel] = (u16)E::narrow(y * (E::widen(given.norm[channel]) + given.offset), 0.f);
    }
    for (int pair = threadIdx.x; pair < C::ROTATED / 2; pair += LATENT_THREADS)
        turn_pair<C>(given.table, position, latent + C::OUT, row + C::OUT, pair);
}

template <typename C>
__device__ __forceinline__ void latent_queries(const LatentQueries& given) {
    typedef LatentProduct<C> Product;
    __shared__ LatentSums sums;
    launch_dependents();
    const int groups = (given.rows + LATENT_ROWS - 1) / LATENT_ROWS, products = groups * given.heads * Product::TILES;
    if (blockIdx.x >= products) return append_latent<C>(given, blockIdx.x - products);
    const int tile = blockIdx.x % Product::TILES, head = blockIdx.x / Product::TILES % given.heads;
    const int first = blockIdx.x / (Product::TILES * given.heads) * LATENT_ROWS;
    const Product product(given.weight + (i64)head * C::OUT * C::IN, tile * Product::COLUMNS);
    FAULT_SITE(latent_queries_wait, wait_for_previous_kernel();)
    const u16* q = given.q + first * given.q_stride + head * (C::IN + C::ROTATED);
    u16* out = given.out + ((i64)first * given.heads + head) * (C::OUT + C::ROTATED);
    const i64 out_stride = (i64)given.heads * (C::OUT + C::ROTATED);
    const int rows = min(LATENT_ROWS, given.rows - first);
    product.multiply(sums, [&](int chunk) {
        return product.u < rows ? load_l2(q + product.u * given.q_stride + 32 * chunk + 8 * product.v) : make_uint4(0, 0, 0, 0);
    });
    Product::finish(sums, [&](int row, int column, u32 pair) {
        if (row < rows) *reinterpret_cast<u32*>(out + row * out_stride + tile * Product::COLUMNS + column) = pair;
    });
    if (tile > 0) return;
    for (int i = threadIdx.x; i < rows * (C::ROTATED / 2); i += LATENT_THREADS) {
        const int row = i / (C::ROTATED / 2), position = min(load_scalar(given.lengths + first + row), given.capacity - 1);
        turn_pair<C>(given.table, position, q + row * given.q_stride + C::IN, out + row * out_stride + C::OUT,
                     i % (C::ROTATED / 2));
    }
}

#define INSTANTIATE_STEP_LATENT_QUERIES(NAME, CONFIGURATION)                                     \
    extern "C" __global__ void __launch_bounds__(LATENT_THREADS) NAME(LatentQueries given) {     \
        latent_queries<CONFIGURATION>(given);                                                    \
    }
