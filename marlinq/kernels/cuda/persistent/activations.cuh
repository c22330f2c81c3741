// Stages a block's part of a product's input: receives it from other blocks, rounds it to the element, and stores its digits
// (mma/integer_digits.cuh) in shared memory, in the order in which the products read them.
#pragma once
#include "codec/int4.cuh"
#include "mma/integer_digits.cuh"
#include "persistent/message.cuh"
#include "persistent/shape.cuh"
#include "ptx/approximate.cuh"
#include "ptx/barrier.cuh"

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value += __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(value), threadIdx.x % 32 ^ distance));
    return value;
}

// `value` rounded to the element.
template <typename E>
__device__ __forceinline__ float rounded(float value) {
    return E::widen(E::narrow(value, value) & 0xffffu);
}

// Waits until all warps that multiply have come here.
template <typename S>
__device__ __forceinline__ void meet() {
    barrier_sync(1, 32 * S::WARPS);
}

// Sources of activations. A source's Pending loads two vectors of N channels of one head for each of COUNT places. request() issues the
// loads of all places before finish() waits for the first, so that their trips through L2 overlap.

// Input of the down projection: products of gate and up that other blocks send.
struct PlainSource {
    static constexpr int UNITS_AT_ONCE = 4;
    const float* values;
    u32 round;

    template <int N, int COUNT>
    struct Pending {
        Letters<2 * COUNT, N> letters;

        __device__ __forceinline__ void request(const PlainSource& source, int c, int first, int second) {
            letters.request(2 * c, source.values + first);
            letters.request(2 * c + 1, source.values + second);
        }
        __device__ __forceinline__ void finish(const PlainSource& source, float (&v)[COUNT][2][N]) {
            await(source.round, letters);
#pragma unroll
            for (int c = 0; c < COUNT; ++c)
#pragma unroll
                for (int n = 0; n < 2 * N; ++n) v[c][n / N][n % N] = letters.value(2 * c + n / N, n % N);
        }
    };
};

// Input of the output projection: attention over each part of the context, merged with the weights of the softmax.
template <typename S>
struct AttentionSource {
    static constexpr int UNITS_AT_ONCE = 1;
    const StepArguments& step;
    const Plan<S>& plan;
    u32 round;

    template <int N, int COUNT>
    struct Pending {
        static_assert(COUNT == 1, "one place");
        static constexpr int AT_ONCE = 4;  // parts whose trips overlap
        Letters<AT_ONCE, 1> weights;
        Letters<2 * AT_ONCE, N> outputs;
        int first, second, splits;

        __device__ __forceinline__ void request(const AttentionSource& source, int, int from, int to) {
            first = from, second = to, splits = source.plan.splits;
            request_parts(source, 0);
        }
        __device__ __forceinline__ void finish(const AttentionSource& source, float (&v)[COUNT][2][N]) {
            float top = -3e38f, sum = 0.f;
#pragma unroll
            for (int n = 0; n < N; ++n) v[0][0][n] = v[0][1][n] = 0.f;
#pragma unroll 1
            for (int part = 0; part < splits; part += AT_ONCE) {
                if (part > 0) request_parts(source, part);
                await(source.round, outputs, weights);
                const int left = splits - part;
                float highest = top;
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s) highest = s < left ? max(highest, weights.value(s, 0)) : highest;
                const float before = fast_exp2(top - highest);
                top = highest, sum *= before;
#pragma unroll
                for (int n = 0; n < N; ++n) v[0][0][n] *= before, v[0][1][n] *= before;
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s) {
                    const float share = s < left ? fast_exp2(weights.value(s, 0) - top) : 0.f;
                    sum += share;
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        v[0][0][n] = fmaf(share, outputs.value(2 * s, n), v[0][0][n]);
                        v[0][1][n] = fmaf(share, outputs.value(2 * s + 1, n), v[0][1][n]);
                    }
                }
            }
            const float unit = fast_reciprocal(sum);
#pragma unroll
            for (int n = 0; n < N; ++n) v[0][0][n] *= unit, v[0][1][n] *= unit;
        }

    private:
        __device__ __forceinline__ void request_parts(const AttentionSource& source, int part) {
            const int heads = source.step.heads;
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s) {
                // No loads for parts that don't exist: a context of 128 has two parts, and loading the second three times
                // took a tenth of the step (8B shape, H200).
                if (part + s >= splits) {
                    weights.omit(s, source.round), outputs.omit(2 * s, source.round), outputs.omit(2 * s + 1, source.round);
                    continue;
                }
                const int at = part + s;
                weights.request(s, source.step.attention_weight + at * heads + first / S::HEAD_DIM);
                outputs.request(2 * s, source.step.attention + (i64)at * heads * S::HEAD_DIM + first);
                outputs.request(2 * s + 1, source.step.attention + (i64)at * heads * S::HEAD_DIM + second);
            }
        }
    };
};

// First of the four channels of a unit whose digits this lane makes (mma/integer_digits.cuh); the others follow at +1, +8 and +9.
__device__ __forceinline__ int channel_of_lane(int unit, int lane) { return unit * 128 + lane / 4 * 16 + lane % 4 * 2; }

// Writes the digits of COUNT units to `memory`. `values` are the lane's four channels of each unit. Every step is issued for all units
// before the next one, so that their latencies overlap. The rounding error is at most 2^-30 of the unit's largest activation.
template <typename S, typename Codec, int COUNT>
__device__ __forceinline__ void make_digits(const float (&values)[COUNT][4], unsigned char* const (&memory)[COUNT], int lane) {
    constexpr int QUANT_GROUP_ROWS = S::QUANT_GROUP_ROWS;
    u32 top[COUNT];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) top[c] = DigitSums<Codec>::largest(values[c]);
    u32 sums[COUNT][4];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        const u32 exponent = max(top[c] >> 23, LEAST_EXPONENT);
        u32 number[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float factor = __uint_as_float((283 - (i < 2 ? 0 : 4) - exponent) << 23);
            number[i] = (u32)round_to_int(values[c][i] * factor) + 0x00808080u;  // digits, the lower three offset by 128
        }
        const u32 low[2] = {permute_bytes<0x5140>(number[0], number[1]), permute_bytes<0x5140>(number[2], number[3])};
        const u32 high[2] = {permute_bytes<0x7362>(number[0], number[1]), permute_bytes<0x7362>(number[2], number[3])};
        const u32 words[4] = {permute_bytes<0x5410>(low[0], low[1]) ^ 0x80808080u, permute_bytes<0x7632>(low[0], low[1]) ^ 0x80808080u,
                              permute_bytes<0x5410>(high[0], high[1]) ^ 0x80808080u, permute_bytes<0x7632>(high[0], high[1])};
        u32* mine = reinterpret_cast<u32*>(memory[c]) + lane % 4 * 8 + lane / 4;
#pragma unroll
        for (int d = 0; d < 4; ++d) mine[32 * d] = words[d], sums[c][d] = dot_bytes(words[d], 0x10100101u);
        if (lane < 4)
            reinterpret_cast<float*>(memory[c] + S::DIGIT_UNIT_AT)[lane] =
                exponent == NOT_FINITE ? __uint_as_float(0x7fffffffu) : __uint_as_float((exponent - 29 + 8 * lane) << 23);
    }
    // Sums of each digit over the quantisation group's rows.
    if constexpr (QUANT_GROUP_ROWS == 8) {
#pragma unroll
        for (int c = 0; c < COUNT; ++c)
#pragma unroll
            for (int d = 0; d < 4; ++d) sums[c][d] = warp_add(sums[c][d]);
    }
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        u32* plain = reinterpret_cast<u32*>(memory[c] + S::PLAIN_AT);
        if constexpr (QUANT_GROUP_ROWS == 8) {
            const u32 mine = lane == 0 ? sums[c][0] : lane == 1 ? sums[c][1] : lane == 2 ? sums[c][2] : sums[c][3];
            if (lane < 4) plain[lane] = mine;
        } else {
#pragma unroll
            for (int d = 0; d < 4; d += 2) sums[c][d] = DigitSums<Codec>::exchange_add(sums[c][d], sums[c][d + 1], lane, 1);
            u32 sum = DigitSums<Codec>::exchange_add(sums[c][0], sums[c][2], lane, 2);
#pragma unroll
            for (int distance = 4; distance < 4 * QUANT_GROUP_ROWS; distance *= 2) sum += __shfl_sync(0xffffffffu, sum, lane ^ distance);
            if (lane / 4 % QUANT_GROUP_ROWS == 0) plain[lane / 4 / QUANT_GROUP_ROWS * 4 + lane % 4] = sum;
        }
    }
}

// Stages units first .. first + units - 1, of `channels` channels in all, in `memory`. It overwrites `memory` once all warps have come
// here, and so have read what was there; the messages are requested before that.
template <typename S, typename Codec, typename Source>
__device__ __forceinline__ void stage_activations(Source& source, const StepArguments& step, int first, int units, int channels,
                                                  unsigned char* memory, int warp, int lane) {
    typedef typename Codec::Element E;
    bool met = false;
    const auto meet_once = [&] {
        if (!met) meet<S>();
        met = true;
    };
    // A few units at once, so that their trips overlap.
    constexpr int AT_ONCE = Source::UNITS_AT_ONCE;
#pragma unroll 1
    for (int from = warp; from < units; from += AT_ONCE * S::WARPS) {
        // Units behind the last one repeat the first.
        const auto unit_of = [&](int i) { return from + i * S::WARPS < units ? from + i * S::WARPS : from; };
        typename Source::template Pending<2, AT_ONCE> pending;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = min(channel_of_lane(first + unit_of(i), lane), channels - 16 + lane % 4 * 2);
            pending.request(source, i, at, at + 8);
        }
        float values[AT_ONCE][2][2], left[AT_ONCE][4];
        unsigned char* places[AT_ONCE];
        pending.finish(source, values);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int unit = unit_of(i);
            const bool exists = channel_of_lane(first + unit, lane) < channels;
#pragma unroll
            for (int n = 0; n < 4; ++n) left[i][n] = exists ? rounded<E>(values[i][n / 2][n % 2]) : 0.f;
            places[i] = memory + unit * S::DIGIT_STRIDE;
        }
        meet_once();
        make_digits<S, Codec>(left, places, lane);
    }
    meet_once();
}
