// The residual stream. Every block keeps its part of K of it, so all blocks of a part keep the same: each adds to it the four
// parts of what o and down give, as their blocks sent them, and makes the next product's activations of it.
//
// The norm's root needs the whole row. Blocks send the sums of squares of their units, and read those of the other parts. With
// a single row nobody waits for them before the product: the root multiplies its sums (persistent/epilogue.cuh).
#pragma once
#include "persistent/activations.cuh"

__device__ __forceinline__ int square_units(const StepArguments& step) { return (step.hidden + 127) / 128; }

// Where the blocks of this block's columns leave the squares of `row`, in front of qkv (0) or gate_up (1).
__device__ __forceinline__ float* squares_of(const StepArguments& step, int which, int row) {
    return step.squares[which] + ((i64)(blockIdx.x / PARTS) * step.rows + row) * square_units(step);
}

// What turns a row into a normal one: 1 / sqrt(mean square + eps), in all lanes.
__device__ __forceinline__ float root_of_row(const StepArguments& step, int which, int row, u32 round, int lane) {
    const int units = square_units(step);
    const float* squares = squares_of(step, which, row);
    float sum = 0.f;
#pragma unroll 1
    for (int from = 0; from < units; from += 32) {
        Letters<1, 1> letter;
        letter.request(0, squares + min(from + lane, units - 1));
        await(round, letter);
        if (from + lane < units) sum += letter.value(0, 0);
    }
    return fast_reciprocal_root(warp_sum(sum) * fast_reciprocal((float)step.hidden) + step.eps);
}

template <typename S, typename Codec>
struct Residual {
    typedef typename Codec::Element E;

    const StepArguments& step;
    const Share<S>& share;  // of a product with the stream as its input
    unsigned char* shared;
    float* roots;  // of the rows, in shared memory
    int warp, lane;

    // Adds what `product` of `layer` gave in `round`; with no layer, takes the hidden state that the step begins with.
    // Then the activations of qkv (which: 0) or gate_up (1) of round `next`; or the step's result, if there is no gamma.
    __device__ __forceinline__ void run(const StepLayer* layer, Product product, u32 round, const float* gamma, int which, u32 next) const {
        const int items = step.rows * share.units;
        const float* parts = layer == nullptr ? step.start : step.parts[product];
        const u16* bias = layer == nullptr ? nullptr : layer->bias[product];
        bool met = false;
        // A warp takes a unit of a row, always the same ones.
#pragma unroll 1
        for (int item = warp; item < items; item += S::WARPS) {
            const int row = S::ROWS == 1 ? 0 : item / share.units, unit = item - row * share.units;
            const int first = (share.first + unit) * S::UNIT, channel = first + 4 * lane;
            const bool exists = channel < step.hidden;
            const int at = min(channel, step.hidden - 4);
            Letters<PARTS, 4> letters;
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                letters.request(p, parts + (layer == nullptr ? (i64)row : (i64)p * step.rows + row) * step.hidden + at);
            float shift[4] = {}, weight[2][2] = {};
            if (bias != nullptr)
                for (int i = 0; i < 4; ++i) shift[i] = E::widen(bias[at + i]);
            const int of_digits = min(channel_of_lane(share.first + unit, lane), step.hidden - 16 + lane % 4 * 2);
            if (S::DIGITS && gamma != nullptr)
                for (int i = 0; i < 4; ++i) weight[i / 2][i % 2] = gamma[of_digits + i / 2 * 8 + i % 2];
            u16* kept = stream(row, unit);
            uint2 before = make_uint2(0, 0);
            if (layer != nullptr) before = *reinterpret_cast<const uint2*>(kept + 4 * lane);
            const float old[4] = {widen_half<E, 0>(before.x), widen_half<E, 1>(before.x), widen_half<E, 0>(before.y), widen_half<E, 1>(before.y)};
            float now[4], square = 0.f;
            await(round, letters);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = letters.value(0, i);
#pragma unroll
                for (int p = 1; p < PARTS; ++p) sum += letters.value(p, i);
                now[i] = layer == nullptr ? letters.value(0, i) : rounded<E>(old[i] + rounded<E>(sum + shift[i]));
                if (!exists) now[i] = 0.f;
                square = fmaf(now[i], now[i], square);
            }
            const uint2 narrow = make_uint2(E::narrow(now[0], now[1]), E::narrow(now[2], now[3]));
            if (gamma == nullptr) {
                if (exists) *reinterpret_cast<uint2*>(step.result + (i64)row * step.hidden + at) = narrow;
                continue;
            }
            *reinterpret_cast<uint2*>(kept + 4 * lane) = narrow;
            if constexpr (S::DIGITS) {
                __syncwarp();
                float left[1][4];
#pragma unroll
                for (int i = 0; i < 4; ++i) left[0][i] = E::widen(kept[lane / 4 * 16 + lane % 4 * 2 + i / 2 * 8 + i % 2]) * weight[i / 2][i % 2];
                if (!met) meet<S>();
                met = true;
                unsigned char* const places[1] = {shared + S::ACTIVATIONS_AT + unit * S::DIGIT_STRIDE};
                make_digits<S, Codec>(left, places, lane);
            }
            square = warp_sum(square);
            if (lane == 0) send(squares_of(step, which, row) + share.first + unit, square, next);
        }
        if (gamma == nullptr) return;
        if constexpr (S::DIGITS) {
            if (!met) meet<S>();
        } else {
            for (int row = warp; row < step.rows; row += S::WARPS) {
                const float root = root_of_row(step, which, row, next, lane);
                if (lane == 0) roots[row] = root;
            }
            meet<S>();
            normalise(gamma);
        }
    }

private:
    // Channels of a unit of a row.
    __device__ __forceinline__ u16* stream(int row, int unit) const {
        return reinterpret_cast<u16*>(shared + S::STREAM_AT) + row * S::STREAM_CHANNELS + unit * S::UNIT;
    }
    // The stream as activations.
    __device__ __forceinline__ void normalise(const float* gamma) const {
        const int pieces = share.units * (S::UNIT / 8);  // of eight channels
        for (int index = 32 * warp + lane; index < step.rows * pieces; index += 32 * S::WARPS) {
            const int row = index / pieces, piece = index - row * pieces, channel = share.first * S::UNIT + 8 * piece;
            const bool exists = channel < step.hidden;
            const u16* kept = stream(row, 0) + 8 * piece;
            const float* weight = gamma + min(channel, step.hidden - 8);
            float v[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float normal = E::widen(kept[i]) * roots[row];
                v[i / 4][i % 4] = (step.narrow_first ? rounded<E>(normal) : normal) * weight[i];
            }
            store_piece<S, E>(shared + S::ACTIVATIONS_AT, row, piece, v, exists);
        }
    }
};
