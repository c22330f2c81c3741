// Queries, keys and values of new tokens: normalised, rotated, and keys and values appended to the cache.
//
//   x [M, turns, (heads + 2 * kv_heads) / turns, D]  ->  q [M, heads, D]
//                                                        keys, values [B, kv_heads, capacity, D] at the rows' positions
//
// A turn holds its share of queries, then of keys, then of values. Row m is token m % T of sequence m / T, at position
// lengths[m / T] + m % T. The rotation multiplies the complex numbers (x[i], x[i + CHANNELS / 2]), or (x[2i], x[2i + 1])
// with INTERLEAVED, with table[position][i] = (cosine, sine).
//
// A warp takes one head, whose channels meet in shared memory. QUERY_NORM and KEY_NORM normalise each head, or with WIDE all
// heads of a row together: every block then sums the squares of the whole row itself.
//
// With HOLD, the next kernel begins when everything before this one is done, instead of as soon as possible.
//
// Configuration: Element, D, WARPS, HOLD, CHANNELS (rotated, of each head), INTERLEAVED, QUERY_NORM, KEY_NORM, WIDE.
#pragma once
#include "ptx/launch.cuh"
#include "step/rows.cuh"

template <typename C>
__device__ __forceinline__ float sum_of_squares(const u32* row, int pairs, float (&sums)[C::WARPS]) {
    typedef typename C::Element E;
    float squares = 0.f;
    for (int pair = threadIdx.x; pair < pairs; pair += 32 * C::WARPS) {
        const u32 found = load_l2_word(row + pair);
        const float low = widen_half<E, 0>(found), high = widen_half<E, 1>(found);
        squares += low * low + high * high;
    }
    return block_sum(squares, sums);
}

template <typename C>
__device__ __forceinline__ void append(const u32* x, u32* q, u32* keys, u32* values, const float2* table, const int* lengths,
                                       const u16* query_weight, const u16* query_bias, const u16* key_weight,
                                       const u16* key_bias, int heads, int kv_heads, int turns, int T, int capacity, i64 x_stride,
                                       int query_weight_stride, int key_weight_stride, float query_eps, float query_offset,
                                       float key_eps, float key_offset) {
    typedef typename C::Element E;
    constexpr int D = C::D, PAIRS = (D / 2 + 31) / 32, HALF = C::CHANNELS / 2;
    __shared__ float shared_heads[C::WARPS][D];
    __shared__ float sums[2][C::WARPS];
    if (!C::HOLD) launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all_heads = heads + 2 * kv_heads;
    const int blocks = (all_heads + C::WARPS - 1) / C::WARPS;
    const i64 m = blockIdx.x / blocks;
    const int head = blockIdx.x % blocks * C::WARPS + warp;
    wait_for_previous_kernel();
    // The attention behind then knows what was done before this kernel: lengths, and keys and values of earlier tokens.
    if (C::HOLD) launch_dependents();
    const int sequence = m / T, position = load_scalar(lengths + sequence) + m % T;
    const u32* row = x + m * (x_stride / 2);
    float query_squares = 0.f, key_squares = 0.f;
    if constexpr (C::WIDE && C::QUERY_NORM != Norm::NONE) query_squares = sum_of_squares<C>(row, heads * D / 2, sums[0]);
    if constexpr (C::WIDE && C::KEY_NORM != Norm::NONE)
        key_squares = sum_of_squares<C>(row + heads * D / 2, kv_heads * D / 2, sums[1]);
    // A full cache takes nothing more; whoever sees to the lengths never comes here.
    if (head >= all_heads || position >= capacity) return;
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const int kv_head = is_value ? head - heads - kv_heads : head - heads;
    const int queries_each = heads / turns, keys_each = kv_heads / turns;
    const int place_in_row =
        is_query ? head / queries_each * (queries_each + 2 * keys_each) + head % queries_each
                 : kv_head / keys_each * (queries_each + 2 * keys_each) + queries_each + is_value * keys_each + kv_head % keys_each;
    row += place_in_row * (D / 2);
    float (&mine)[D] = shared_heads[warp];
    float squares = 0.f, sum = 0.f;
    u32 found[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = lane + 32 * i;
        found[i] = pair < D / 2 ? load_l2_word(row + pair) : 0;
        const float low = widen_half<E, 0>(found[i]), high = widen_half<E, 1>(found[i]);
        sum += low + high;
        squares += low * low + high * high;
    }
    const i64 place = (((i64)sequence * kv_heads + kv_head) * capacity + position) * (D / 2);
    u32* target = is_query ? q + (m * heads + head) * (D / 2) : (is_value ? values : keys) + place;
    if (is_value) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            if (lane + 32 * i < D / 2) target[lane + 32 * i] = found[i];
        return;
    }
    const auto normalize_head = [&](Norm kind, const u16* weight, const u16* bias, int stride, int number, float wide,
                                    int wide_heads, float eps, float offset) {
        float mean = 0.f;
        if (kind == Norm::LAYER) {
            mean = warp_sum(sum) / D;
            squares = 0.f;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float low = widen_half<E, 0>(found[i]) - mean, high = widen_half<E, 1>(found[i]) - mean;
                if (lane + 32 * i < D / 2) squares += low * low + high * high;
            }
        }
        const float total = C::WIDE ? wide / (D * wide_heads) : warp_sum(squares) / D;
        const float factor = 1.f / sqrtf(total + eps);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = lane + 32 * i;
            if (pair >= D / 2) continue;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int channel = 2 * pair + j;
                float y = ((j ? widen_half<E, 1>(found[i]) : widen_half<E, 0>(found[i])) - mean) * factor;
                if (kind == Norm::RMS) y = rounded<E>(y);
                y *= (weight ? E::widen(weight[number * stride + channel]) : 1.f) + offset;
                mine[channel] = y + (bias ? E::widen(bias[number * stride + channel]) : 0.f);
            }
        }
    };
    const Norm kind = is_query ? C::QUERY_NORM : C::KEY_NORM;
    if (kind == Norm::NONE) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            if (lane + 32 * i < D / 2) {
                mine[2 * (lane + 32 * i)] = widen_half<E, 0>(found[i]);
                mine[2 * (lane + 32 * i) + 1] = widen_half<E, 1>(found[i]);
            }
    } else if (is_query) {
        normalize_head(C::QUERY_NORM, query_weight, query_bias, query_weight_stride, head, query_squares, heads, query_eps,
                       query_offset);
    } else {
        normalize_head(C::KEY_NORM, key_weight, key_bias, key_weight_stride, kv_head, key_squares, kv_heads, key_eps,
                       key_offset);
    }
    __syncwarp();
    const float2* angles = table + (i64)position * HALF;
    const auto rotated = [&](int channel) {
        const float own = mine[channel];
        if (channel >= C::CHANNELS) return own;
        const bool second = C::INTERLEAVED ? channel % 2 : channel >= HALF;
        const int partner = C::INTERLEAVED ? channel ^ 1 : second ? channel - HALF : channel + HALF;
        const float2 turn = angles[C::INTERLEAVED ? channel / 2 : second ? partner : channel];
        return own * turn.x + (second ? mine[partner] : -mine[partner]) * turn.y;
    };
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = lane + 32 * i;
        if (pair < D / 2) target[pair] = E::narrow(rotated(2 * pair), rotated(2 * pair + 1));
    }
}

#define INSTANTIATE_STEP_APPEND(NAME, CONFIGURATION)                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * CONFIGURATION::WARPS)                                                \
    NAME(const u32* x, u32* q, u32* keys, u32* values, const float2* table, const int* lengths, const u16* query_weight,   \
         const u16* query_bias, const u16* key_weight, const u16* key_bias, int heads, int kv_heads, int turns, int T,     \
         int capacity, i64 x_stride, int query_weight_stride, int key_weight_stride, float query_eps, float query_offset, float key_eps, \
         float key_offset) {                                                                                               \
        append<CONFIGURATION>(x, q, keys, values, table, lengths, query_weight, query_bias, key_weight, key_bias, heads,   \
                              kv_heads, turns, T, capacity, x_stride, query_weight_stride, key_weight_stride, query_eps,          \
                              query_offset, key_eps, key_offset);                                                          \
    }
