// A block's part of a product's input: received from other blocks, normalised where the model says so, and laid out in shared
// memory as the products want it.
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

// Warps that multiply meet here.
template <typename S>
__device__ __forceinline__ void meet() {
    barrier_sync(1, 32 * S::WARPS);
}

// Sources of activations. Each gives two vectors of N channels of one row and head: `Pending` requests them, so that trips
// overlap, and then brings them.

// The input of down.
struct PlainSource {
    static constexpr int UNITS_AT_ONCE = 4;
    const float* values;
    int channels;
    u32 round;

    template <typename E, int N>
    struct Pending {
        Letters<2, N> letters;

        __device__ __forceinline__ void request(const PlainSource& source, int row, int first, int second) {
            letters.request(0, source.values + (i64)row * source.channels + first);
            letters.request(1, source.values + (i64)row * source.channels + second);
        }
        __device__ __forceinline__ void finish(const PlainSource& source, float (&v)[2][N]) { letters.await(source.round, v); }
    };
};

// The attention's parts of a context, put together.
template <typename S>
struct AttentionSource {
    static constexpr int UNITS_AT_ONCE = 1;
    const StepArguments& step;
    const Plan<S>& plan;
    u32 round;

    template <typename E, int N>
    struct Pending {
        static constexpr int AT_ONCE = S::ROWS == 1 ? 4 : 2;  // parts whose trips overlap
        Letters<AT_ONCE, 1> weights;
        Letters<2 * AT_ONCE, N> outputs;
        int row, first, second, splits;

        __device__ __forceinline__ void request(const AttentionSource& source, int of_row, int from, int to) {
            row = of_row, first = from, second = to, splits = source.plan.splits[row];
            request_parts(source, 0);
        }
        __device__ __forceinline__ void finish(const AttentionSource& source, float (&v)[2][N]) {
            float top = -3e38f, sum = 0.f;
#pragma unroll
            for (int n = 0; n < N; ++n) v[0][n] = v[1][n] = 0.f;
#pragma unroll 1
            for (int part = 0; part < splits; part += AT_ONCE) {
                if (part > 0) request_parts(source, part);
                float weight[AT_ONCE][1], output[2 * AT_ONCE][N];
                weights.await(source.round, weight);
                outputs.await(source.round, output);
                float highest = top;
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s) highest = max(highest, weight[s][0]);
                const float before = fast_exp2(top - highest);
                top = highest, sum *= before;
#pragma unroll
                for (int n = 0; n < N; ++n) v[0][n] *= before, v[1][n] *= before;
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s) {
                    const float share = part + s < splits ? fast_exp2(weight[s][0] - top) : 0.f;
                    sum += share;
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        v[0][n] = fmaf(share, output[2 * s][n], v[0][n]);
                        v[1][n] = fmaf(share, output[2 * s + 1][n], v[1][n]);
                    }
                }
            }
            const float unit = fast_reciprocal(sum);
#pragma unroll
            for (int n = 0; n < N; ++n) v[0][n] *= unit, v[1][n] *= unit;
        }

    private:
        __device__ __forceinline__ void request_parts(const AttentionSource& source, int part) {
            const int heads = source.step.heads;
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s) {
                const int at = row * MAX_SPLITS + min(part + s, splits - 1);
                weights.request(s, source.step.attention_weight + at * heads + first / S::HEAD_DIM);
                outputs.request(2 * s, source.step.attention + (i64)at * heads * S::HEAD_DIM + first);
                outputs.request(2 * s + 1, source.step.attention + (i64)at * heads * S::HEAD_DIM + second);
            }
        }
    };
};

// The first of a unit's channels whose digits this lane makes (mma/integer_digits.cuh); the others are 1, 8 and 9 behind.
__device__ __forceinline__ int channel_of_lane(int unit, int lane) { return unit * 128 + lane / 4 * 16 + lane % 4 * 2; }

// The digits of a unit, from the channels of every lane.
template <typename S, typename Codec>
__device__ __forceinline__ void make_digits(float (&left)[4], unsigned char* unit, int lane) {
    const u32 exponent = max(DigitSums<Codec>::largest(left) >> 23, LEAST_EXPONENT);
    float weight;
    // What rounding leaves is 2^-30 of the unit's largest activation, and is left out.
    const u32 plain = DigitSums<Codec>::template to_digits<S::QUANT_GROUP_ROWS>(left, exponent, reinterpret_cast<u32*>(unit), lane, weight);
    if (lane / 4 % S::QUANT_GROUP_ROWS == 0)
        reinterpret_cast<u32*>(unit + S::PLAIN_AT)[lane / 4 / S::QUANT_GROUP_ROWS * 4 + lane % 4] = plain;
    if (lane < 4) reinterpret_cast<float*>(unit + S::DIGIT_UNIT_AT)[lane] = weight;
}

// Eight channels of a row, where operand B wants them.
template <typename S, typename E>
__device__ __forceinline__ void store_piece(unsigned char* memory, int row, int piece, const float (&v)[2][4], bool exists) {
    const uint4 eight =
        make_uint4(E::narrow(v[0][0], v[0][1]), E::narrow(v[0][2], v[0][3]), E::narrow(v[1][0], v[1][1]), E::narrow(v[1][2], v[1][3]));
    *reinterpret_cast<uint4*>(memory + piece / 8 * S::SLAB_BYTES + row * 128 + ((piece % 8 ^ row % 8) * 16)) =
        exists ? eight : make_uint4(0, 0, 0, 0);
}

// Units first .. first + units - 1 of `channels` channels to `memory`, when all warps have read what was there. Their messages
// are requested before that.
template <typename S, typename Codec, typename Source>
__device__ __forceinline__ void stage_activations(Source& source, const StepArguments& step, int first, int units, int channels,
                                                  unsigned char* memory, int warp, int lane) {
    typedef typename Codec::Element E;
    bool met = false;
    const auto meet_once = [&] {
        if (!met) meet<S>();
        met = true;
    };
    if constexpr (S::DIGITS) {
        // A few units at once, so that their trips overlap.
        constexpr int AT_ONCE = Source::UNITS_AT_ONCE;
#pragma unroll 1
        for (int from = warp; from < units; from += AT_ONCE * S::WARPS) {
            typename Source::template Pending<E, 2> pending[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                // Units and rows behind the last repeat others.
                const int at = min(channel_of_lane(first + min(from + i * S::WARPS, units - 1), lane), channels - 16 + lane % 4 * 2);
                pending[i].request(source, 0, at, at + 8);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int unit = from + i * S::WARPS;
                float values[2][2], left[4];
                pending[i].finish(source, values);
                meet_once();
                const bool exists = channel_of_lane(first + unit, lane) < channels;
#pragma unroll
                for (int n = 0; n < 4; ++n) left[n] = exists ? rounded<E>(values[n / 2][n % 2]) : 0.f;
                if (unit < units) make_digits<S, Codec>(left, memory + unit * S::DIGIT_STRIDE, lane);
            }
        }
    } else {
        const int pieces = units * (S::UNIT / 8), all = step.rows * pieces;  // of eight channels
        constexpr int AT_ONCE = 2, THREADS = 32 * S::WARPS;
        // Whole warps go on together, since they meet.
#pragma unroll 1
        for (int start = 32 * warp; start < all; start += AT_ONCE * THREADS) {
            const int from = start + lane;
            typename Source::template Pending<E, 4> pending[AT_ONCE];
            int row[AT_ONCE], piece[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int index = min(from + i * THREADS, all - 1);
                row[i] = index / pieces, piece[i] = index - row[i] * pieces;
                const int at = min(first * S::UNIT + 8 * piece[i], channels - 8);
                pending[i].request(source, row[i], at, at + 4);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float v[2][4];
                pending[i].finish(source, v);
                __syncwarp();
                meet_once();
                if (from + i * THREADS >= all) continue;
                store_piece<S, E>(memory, row[i], piece[i], v, first * S::UNIT + 8 * piece[i] < channels);
            }
        }
    }
    meet_once();
}
