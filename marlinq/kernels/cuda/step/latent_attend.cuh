// Attention of one new token per sequence over a cache of latents and rotated keys, which all heads share.
//
//   sums[m, split, h] = sum over positions of 2^(s[h] - maximum) latent[position]        s = scale * query[m, h] . row[position]
//
// A block takes one row, one split of its positions and up to 32 heads. Rows of the cache come into a ring of STAGES tiles of
// TILE positions (cp.async); each serves as keys, WIDTH wide, and its first L channels as values:
//
//   S (16 positions x 8 heads)  += K (16 x 16 channels) Q^T      warp (16 positions, part) takes every PARTS-th 32 channels;
//                                                                the parts meet in shared memory, where 8 threads a head
//                                                                find maxima and exponentials, rounded to P [heads, TILE]
//   O (16 channels x 8 heads)   += V^T (16 x 16 positions) P^T   a warp takes L / WARPS channels; ldmatrix.trans turns V
//
// Positions are rows and heads are columns of the products, so 20 heads cost 24 and not 32. Old rows are requested before the
// previous kernel has ended: a step's first kernel begins when all of the step before is done. The newest row is the previous
// kernel's (step/latent_queries.cuh). step/latent_values.cuh adds the splits.
//
// Row m reads sequence m, or sequence 0 where `sequences` is 1 (neighbouring tokens); it sees positions 0..lengths[m].
//
// Configuration: Element, L (a multiple of 128), WIDTH (a multiple of 32), HEADS (of a block, a multiple of 8), TILE (16 or
// 32), STAGES (2 or more); SHARED_BYTES, the host's count of dynamic shared memory.
#pragma once
#include "fault_site.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/matrix.cuh"
#include "step/latent_split.cuh"
#include "step/rows.cuh"

constexpr int LATENT_WARPS = 8;

// Mirrored in kernels/step/latent.py.
struct LatentAttention {
    const u16 *queries, *cache;  // [rows, heads, WIDTH], [sequences, capacity, WIDTH]
    float* sums;                 // [rows, splits, heads, L]
    float2* totals;              // [rows, splits, heads]: maximum and total
    const int* lengths;
    int heads, sequences, splits, capacity;
    float scale;  // factor on the dot products, times log2(e)
};

template <typename C>
__device__ __forceinline__ void latent_attend(const LatentAttention& given) {
    typedef typename C::Element E;
    constexpr int L = C::L, WIDTH = C::WIDTH, HEADS = C::HEADS, TILE = C::TILE, STAGES = C::STAGES, THREADS = 32 * LATENT_WARPS;
    constexpr int PARTS = LATENT_WARPS * 16 / TILE, GROUPS = HEADS / 8, STRIPS = L / (16 * LATENT_WARPS);
    // Rows of 16-bit elements begin 4 banks apart, so that ldmatrix meets no bank twice.
    constexpr int PITCH = WIDTH + 8, P_PITCH = TILE + 8, S_PITCH = HEADS % 16 ? HEADS : HEADS + 8, VECTORS = WIDTH / 8;
    constexpr int QUERIES_AT = STAGES * TILE * PITCH * 2, SCORES_AT = QUERIES_AT + HEADS * PITCH * 2;
    constexpr int P_AT = SCORES_AT + PARTS * TILE * S_PITCH * 4, SHRINK_AT = P_AT + HEADS * P_PITCH * 2;
    static_assert(C::SHARED_BYTES == SHRINK_AT + HEADS * 4, "host and kernel count different bytes of shared memory");
    static_assert(L % (16 * LATENT_WARPS) == 0 && WIDTH % 32 == 0 && HEADS <= 32, "whole strips, chunks and warps");
    const float LOWEST = __uint_as_float(0xff800000u);  // minus infinity
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 rows_at = shared_address(shared), queries_at = rows_at + QUERIES_AT;
    float* scores = reinterpret_cast<float*>(shared + SCORES_AT);
    u16* p = reinterpret_cast<u16*>(shared + P_AT);
    float* shrinks = reinterpret_cast<float*>(shared + SHRINK_AT);
    launch_dependents();
    const int chunks = (given.heads + HEADS - 1) / HEADS;
    const int split = blockIdx.x % given.splits, chunk = blockIdx.x / given.splits % chunks, m = blockIdx.x / (given.splits * chunks);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, u = lane / 4, v = lane % 4;
    const int first_head = chunk * HEADS, heads = min(HEADS, given.heads - first_head);
    const int tokens = min(load_scalar(given.lengths + m) + 1, given.capacity);
    // Rows of the cache that earlier steps have written.
    const int old = load_scalar(given.lengths + (given.sequences == 1 ? 0 : m));
    const LatentSplit span = latent_split<TILE>(tokens, given.splits, split);
    if (split >= span.active) return;
    const u16* cache = given.cache + (given.sequences == 1 ? 0 : m) * (i64)given.capacity * WIDTH;
    // Positions [from, to) of a tile; others get zeros where `fills`.
    const auto request = [&](int tile, int from, int to, bool fills) {
        const u32 stage = rows_at + (tile - span.first) / TILE % STAGES * (TILE * PITCH * 2);
        for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
            const int row = i / VECTORS, vector = i % VECTORS, position = tile + row;
            const bool there = position >= from && position < to;
            if (there || fills)
                copy_async_16(stage + row * (PITCH * 2) + vector * 16, cache + (i64)(there ? position : span.first) * WIDTH + 8 * vector,
                              there ? 16 : 0);
        }
    };
    // The first tiles: old rows now, new ones later.
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        const int tile = span.first + stage * TILE;
        if (tile < span.last) request(tile, tile, FAULT_SITE(latent_old_rows, min(span.last, old)), false);
    }
    FAULT_SITE(latent_attend_waits, wait_for_previous_kernel();)
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        const int tile = span.first + stage * TILE, end = tile + TILE;
        if (tile >= span.last || end <= min(span.last, old)) continue;
        for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
            const int row = i / VECTORS, vector = i % VECTORS, position = tile + row;
            if (position < min(span.last, old)) continue;
            const bool there = position < span.last;
            copy_async_16(rows_at + (stage * TILE + row) * (PITCH * 2) + vector * 16,
                          cache + (i64)(there ? position : span.first) * WIDTH + 8 * vector, there ? 16 : 0);
        }
    }
    const u16* queries = given.queries + ((i64)m * given.heads + first_head) * WIDTH;
    for (int i = threadIdx.x; i < HEADS * VECTORS; i += THREADS) {
        const int head = i / VECTORS, vector = i % VECTORS;
        copy_async_16(queries_at + head * (PITCH * 2) + vector * 16, queries + (head < heads ? head : 0) * WIDTH + 8 * vector,
                      head < heads ? 16 : 0);
    }
    // Each tile is a group of copies. The first group has all copies requested so far; the others are empty.
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copy_async_commit();
    float o[STRIPS][GROUPS][4];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int r = 0; r < 4; ++r) o[s][g][r] = 0.f;
    // Thread (head, i) keeps the maximum, which the 8 threads of a head share, and its own part of the total.
    const int my_head = threadIdx.x / 8, i = threadIdx.x % 8;
    float maximum = LOWEST, total = 0.f;
#pragma unroll 1
    for (int tile = span.first; tile < span.last; tile += TILE) {
        copy_async_wait<STAGES - 2>();
        FAULT_SITE(latent_tile_there, __syncthreads();)
        // The stage of the tile before is free: every warp has passed this barrier.
        const int later = tile + (STAGES - 1) * TILE;
        if (later < span.last) request(later, later, span.last, true);
        copy_async_commit();
        const u32 stage = rows_at + (tile - span.first) / TILE % STAGES * (TILE * PITCH * 2);
        {
            const int strip = warp / PARTS, part = warp % PARTS;
            float s[GROUPS][4];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int r = 0; r < 4; ++r) s[g][r] = 0.f;
            const u32 keys = stage + (16 * strip + lane % 16) * (PITCH * 2) + lane / 16 * 16;
            const u32 mine = queries_at + lane % 8 * (PITCH * 2) + lane / 8 * 16;
#pragma unroll
            for (int channels = part; channels < WIDTH / 32; channels += PARTS) {
                u32 low[4], high[4];
                load_matrix_x4(low, keys + 64 * channels);
                load_matrix_x4(high, keys + 64 * channels + 32);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    u32 q[4];
                    load_matrix_x4(q, mine + g * 8 * (PITCH * 2) + 64 * channels);
                    E::multiply_accumulate(s[g], low, q[0], q[1]);
                    E::multiply_accumulate(s[g], high, q[2], q[3]);
                }
            }
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *reinterpret_cast<float2*>(scores + (part * TILE + 16 * strip + u + 8 * h) * S_PITCH + 8 * g + 2 * v) =
                        make_float2(s[g][2 * h], s[g][2 * h + 1]);
        }
        FAULT_SITE(latent_scores_there, __syncthreads();)
        if (my_head < HEADS) {
            float x[TILE / 8], most = LOWEST;
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j) {
                const int position = i + 8 * j;
                float sum = 0.f;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) sum += scores[(part * TILE + position) * S_PITCH + my_head];
                x[j] = FAULT_SITE(latent_mask, tile + position < span.last) ? sum * given.scale : LOWEST;
                most = x[j] > most ? x[j] : most;
            }
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2) {
                const float other = of_lane(most, lane ^ distance);
                most = other > most ? other : most;
            }
            most = most > maximum ? most : maximum;
            const float shrink = exp2f(maximum - most);
            maximum = most, total *= shrink;
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j) {
                const float power = exp2f(x[j] - most);
                total += power;
                p[my_head * P_PITCH + i + 8 * j] = (u16)E::narrow(power, 0.f);
            }
            if (i == 0) shrinks[my_head] = shrink;
        }
        FAULT_SITE(latent_powers_there, __syncthreads();)
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const float2 shrink = *reinterpret_cast<const float2*>(shrinks + 8 * g + 2 * v);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                o[s][g][0] *= shrink.x, o[s][g][1] *= shrink.y;
                o[s][g][2] *= shrink.x, o[s][g][3] *= shrink.y;
            }
        }
        const u32 values = stage + (lane % 8 + lane / 16 * 8) * (PITCH * 2) + (warp * STRIPS * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
        for (int positions = 0; positions < TILE; positions += 16) {
            u32 b[GROUPS][2];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    b[g][h] = *reinterpret_cast<const u32*>(p + (8 * g + u) * P_PITCH + positions + 8 * h + 2 * v);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                u32 a[4];
                load_matrix_x4_transposed(a, values + positions * (PITCH * 2) + s * 32);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) E::multiply_accumulate(o[s][g], a, b[g][0], b[g][1]);
            }
        }
    }
    const i64 slot = ((i64)m * given.splits + split) * given.heads + first_head;
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) total += of_lane(total, lane ^ distance);
    if (my_head < heads && i == 0) given.totals[slot + my_head] = make_float2(maximum, total);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int head = 8 * g + 2 * v + r % 2;
            if (head >= heads) continue;
            float* to = given.sums + (slot + head) * L + warp * STRIPS * 16 + u + 8 * (r / 2);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) to[16 * s] = o[s][g][r];
        }
}

#define INSTANTIATE_STEP_LATENT_ATTEND(NAME, CONFIGURATION)                                                    \
    extern "C" __global__ void __launch_bounds__(32 * LATENT_WARPS, 1) NAME(LatentAttention given) {           \
        latent_attend<CONFIGURATION>(given);                                                                   \
    }
