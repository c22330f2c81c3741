// Normalises and rotates queries and keys of a new token, a warp a head, and normalises values.
//
// A row of the product is [turns, (each * heads + (1 + values) * kv_heads) / turns, D]; a turn holds its share of queries, then of
// keys, then of values. Where `values` is 0 instead of 1, values are what was projected as keys. Each of the queries is followed by D
// gates where `each` is 2, instead of 1. Behind the last turn there may be other gates (step/attend.cuh). With SHARED a row has queries
// alone, and keys and values are those that another layer has put into the cache. The rotation multiplies the complex numbers
// (x[i], x[i + CHANNELS / 2]), or (x[2i], x[2i + 1]) with INTERLEAVED, with table[position][i] = (cosine, sine).
//
// QUERY_NORM and KEY_NORM normalise each head, before the rotation or with NORMS_BEHIND behind it; or with WIDE, before it, all heads of
// a row together: every block then sums the squares of the whole row itself. With VALUES_NORMED each head of values is divided by its
// root mean square.
//
// Of the configuration: Element, D, WARPS, CHANNELS (rotated, of each head), INTERLEAVED, QUERY_NORM, KEY_NORM, VALUES_NORMED, SHARED,
// WIDE, NORMS_BEHIND.
#pragma once
#include "ptx/approximate.cuh"
#include "step/rows.cuh"

// Mirrored in kernels/step/heads.py.
struct NewHeads {
    const u32* x;
    const float2* table;
    const u16 *query_weight, *query_bias, *key_weight, *key_bias;
    i64 x_stride;
    int heads, kv_heads, turns, each, values, query_weight_stride, key_weight_stride;
    float query_eps, query_offset, key_eps, key_offset, value_eps;

    // The row of the product of token m.
    __device__ __forceinline__ const u32* row(i64 m) const { return x + m * (x_stride / 2); }
    // Where head `number` of a row begins, in heads. Numbers count queries, then keys, then values.
    __device__ __forceinline__ int place(int number) const {
        const bool is_query = number < heads, is_value = number >= heads + kv_heads;
        const int kv_head = is_value ? number - heads - kv_heads : number - heads;
        const int queries_each = heads / turns, keys_each = kv_heads / turns;
        const int turn = each * queries_each + (1 + values) * keys_each;
        return is_query ? number / queries_each * turn + number % queries_each * each
                        : kv_head / keys_each * turn + each * queries_each + is_value * values * keys_each + kv_head % keys_each;
    }
    // Where gates behind all other columns of a row begin, in heads; with `shared` a row has queries alone.
    __device__ __forceinline__ int gates(bool shared) const { return each * heads + (shared ? 0 : (1 + values) * kv_heads); }
};

// Sums of squares of all queries and of all keys of a row, where they are normalised together.
template <typename C>
struct WideSquares {
    float queries = 0.f, keys = 0.f;

    // By the whole block.
    __device__ __forceinline__ WideSquares(const NewHeads& given, const u32* row, float (&sums)[2][C::WARPS]) {
        if constexpr (C::WIDE && C::QUERY_NORM != Norm::NONE) queries = sum(row, given.heads * C::D / 2, sums[0]);
        if constexpr (C::WIDE && C::KEY_NORM != Norm::NONE)
            keys = sum(row + given.heads * C::D / 2, given.kv_heads * C::D / 2, sums[1]);
    }
    static __device__ __forceinline__ float sum(const u32* row, int pairs, float (&sums)[C::WARPS]) {
        typedef typename C::Element E;
        float squares = 0.f;
        for (int pair = threadIdx.x; pair < pairs; pair += 32 * C::WARPS) {
            const u32 found = load_l2_word(row + pair);
            const float low = widen_half<E, 0>(found), high = widen_half<E, 1>(found);
            squares += low * low + high * high;
        }
        return block_sum(squares, sums);
    }
};

template <typename C>
struct Head {
    typedef typename C::Element E;
    static constexpr int D = C::D, PAIRS = (D / 2 + 31) / 32, HALF = C::CHANNELS / 2;

    // Cosines and sines that rotate a lane's channels, at one position.
    struct Angles {
        float2 of[PAIRS][2];

        __device__ __forceinline__ Angles(const NewHeads& given, int position, int lane) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int channel = 2 * (lane + 32 * i) + j;
                    const int angle = C::INTERLEAVED ? channel / 2 : channel < HALF ? channel : channel - HALF;
                    if (channel < C::CHANNELS) of[i][j] = given.table[(i64)position * HALF + angle];
                }
        }
    };

    u32 pairs[PAIRS] = {};  // channels 2p and 2p + 1 of p = lane + 32 i

    __device__ __forceinline__ void load(const u32* head, int lane) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) pairs[i] = lane + 32 * i < D / 2 ? load_l2_word(head + lane + 32 * i) : 0;
    }
    __device__ __forceinline__ void store(u32* head, int lane) const {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            if (lane + 32 * i < D / 2) head[lane + 32 * i] = pairs[i];
    }

    // Writes the normalised head to `mine`. `number`: index of the head, for norms with weights for each; `wide`: sum of squares over all
    // `wide_heads` heads of its kind.
    template <Norm KIND>
    __device__ __forceinline__ void normalize(float (&mine)[D], const u16* weight, const u16* bias, int stride, int number,
                                              float wide, int wide_heads, float eps, float offset, int lane) const {
        float mean = 0.f, sum = 0.f, squares = 0.f;
        if (KIND == Norm::LAYER) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) sum += widen_half<E, 0>(pairs[i]) + widen_half<E, 1>(pairs[i]);
            mean = warp_sum(sum) / D;
        }
        if (KIND != Norm::NONE) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float low = widen_half<E, 0>(pairs[i]) - mean, high = widen_half<E, 1>(pairs[i]) - mean;
                if (lane + 32 * i < D / 2) squares += low * low + high * high;
            }
        }
        float factor = 1.f;
        if (KIND != Norm::NONE) {
            const float total = C::WIDE ? wide / (D * wide_heads) : warp_sum(squares) / D;
            factor = fast_reciprocal_root(total + eps);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = lane + 32 * i;
            if (pair >= D / 2) continue;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int channel = 2 * pair + j;
                float y = ((j ? widen_half<E, 1>(pairs[i]) : widen_half<E, 0>(pairs[i])) - mean) * factor;
                if (KIND == Norm::RMS) y = rounded<E>(y);
                if (KIND != Norm::NONE) {
                    y *= (weight ? E::widen(weight[number * stride + channel]) : 1.f) + offset;
                    y += bias ? E::widen(bias[number * stride + channel]) : 0.f;
                }
                mine[channel] = y;
            }
        }
    }
    __device__ __forceinline__ void rotate(const float (&mine)[D], const Angles& angles, int lane) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            float y[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int channel = 2 * (lane + 32 * i) + j;
                y[j] = 0.f;
                if (channel >= D) continue;
                y[j] = mine[channel];
                if (channel >= C::CHANNELS) continue;
                const bool second = C::INTERLEAVED ? channel % 2 : channel >= HALF;
                const int partner = C::INTERLEAVED ? channel ^ 1 : second ? channel - HALF : channel + HALF;
                y[j] = y[j] * angles.of[i][j].x + (second ? mine[partner] : -mine[partner]) * angles.of[i][j].y;
            }
            pairs[i] = E::narrow(y[0], y[1]);
        }
    }
    // Normalises and rotates a query or a key, the one of index `number` of its kind. `mine`: shared memory of the warp.
    __device__ __forceinline__ void transform(const NewHeads& given, bool is_query, int number, const WideSquares<C>& wide,
                                              const Angles& angles, float (&mine)[D], int lane) {
        __syncwarp();
        if constexpr (C::NORMS_BEHIND) {
            normalize<Norm::NONE>(mine, nullptr, nullptr, 0, number, 0.f, 1, 0.f, 0.f, lane);
            __syncwarp();
            rotate(mine, angles, lane);
            __syncwarp();
        }
        if (is_query)
            normalize<C::QUERY_NORM>(mine, given.query_weight, given.query_bias, given.query_weight_stride, number,
                                     wide.queries, given.heads, given.query_eps, given.query_offset, lane);
        else
            normalize<C::KEY_NORM>(mine, given.key_weight, given.key_bias, given.key_weight_stride, number, wide.keys,
                                   given.kv_heads, given.key_eps, given.key_offset, lane);
        if constexpr (C::NORMS_BEHIND) {
            // Each lane has normalised these channels itself, so it waits for no other.
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int pair = lane + 32 * i;
                if (pair < D / 2) pairs[i] = E::narrow(mine[2 * pair], mine[2 * pair + 1]);
            }
        } else {
            __syncwarp();
            rotate(mine, angles, lane);
        }
    }
    // Normalises a value, with VALUES_NORMED.
    __device__ __forceinline__ void transform_value(const NewHeads& given) {
        if constexpr (C::VALUES_NORMED) {
            float squares = 0.f;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                // Pairs beyond the head are zero.
                const float low = widen_half<E, 0>(pairs[i]), high = widen_half<E, 1>(pairs[i]);
                squares += low * low + high * high;
            }
            const float factor = fast_reciprocal_root(warp_sum(squares) / D + given.value_eps);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i)
                pairs[i] = E::narrow(widen_half<E, 0>(pairs[i]) * factor, widen_half<E, 1>(pairs[i]) * factor);
        }
    }
};
