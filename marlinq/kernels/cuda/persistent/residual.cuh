// The residual stream. Every block keeps its part of K of the stream; blocks of the same part keep equal copies. Each adds the four
// partial sums of o or down, as other blocks sent them, and computes the next product's activations.
//
// The norm's root needs the whole row. Blocks send the sums of squares of their units, and read those of the other parts. The product
// does not wait for them: its sums are multiplied by the root (persistent/epilogue.cuh).
#pragma once
#include "persistent/activations.cuh"

__device__ __forceinline__ int square_units(const StepArguments& step) { return (step.hidden + 127) / 128; }

// Where the blocks of `group` of columns leave the sums of squares.
__device__ __forceinline__ float* squares_of(const StepArguments& step, float* squares, int group) {
    return squares + (i64)group * square_units(step);
}

// 1 / sqrt(mean square + eps) of a row, from the sums of squares of its units; in all lanes.
__device__ __forceinline__ float root_of_row(const StepArguments& step, const float* squares, u32 round, int lane) {
    const int units = square_units(step);
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
    int warp, lane;

    // Adds the result of `product` of `layer`, of round `round`, to the stream, after its norm with POST_NORMS; without a layer, takes the
    // hidden state that the step begins with. Then computes the activations of qkv (which: 0) or gate_up (1) of round `next`; or,
    // without gamma, stores the step's result.
    __device__ __forceinline__ void run(const StepLayer* layer, Product product, u32 round, const float* gamma, int which, u32 next) const {
        const int items = share.units;
        const float* parts = layer == nullptr ? step.start : step.parts[product];
        const u16* bias = layer == nullptr ? nullptr : layer->bias[product];
        float* squares = step.post_squares[product == DOWN];
        bool met = false;
        // A warp takes a unit of a row, always the same ones.
#pragma unroll 1
        for (int item = warp; item < items; item += S::WARPS) {
            const Item it(*this, item);
            Letters<PARTS, 4> letters;
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                letters.request(p, parts + (layer == nullptr ? 0 : (i64)p * step.hidden) + it.at);
            float shift[4] = {}, weight[4] = {}, now[4], square = 0.f;
            if (bias != nullptr)
                for (int i = 0; i < 4; ++i) shift[i] = E::widen(bias[it.at + i]);
            if (!S::POST_NORMS || layer == nullptr) load_weight(gamma, it.unit, weight);
            await(round, letters);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = letters.value(0, i);
#pragma unroll
                for (int p = 1; p < PARTS; ++p) sum += letters.value(p, i);
                now[i] = layer == nullptr ? letters.value(0, i) : rounded<E>(sum + shift[i]);
                if (!it.exists) now[i] = 0.f;
                square = fmaf(now[i], now[i], square);
            }
            if (S::POST_NORMS && layer != nullptr) {
                store(made(it), now);
                send_squares(squares, it, square, round);
            } else {
                if (layer != nullptr) add(it, now);
                finish(it, now, gamma, weight, which, next, met);
            }
        }
        if (S::POST_NORMS && layer != nullptr) {
#pragma unroll 1
            for (int item = warp; item < items; item += S::WARPS) {
                const Item it(*this, item);
                float weight[4] = {}, post[4], now[4];
                load_weight(gamma, it.unit, weight);
#pragma unroll
                for (int i = 0; i < 4; ++i) post[i] = layer->post_gamma[product == DOWN][it.at + i];
                const float root = root_of_row(step, squares_of(step, squares, share.group), round, lane);
                load(made(it), now);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float normal = now[i] * root;
                    now[i] = rounded<E>((step.narrow_first ? rounded<E>(normal) : normal) * post[i]);
                }
                add(it, now);
                finish(it, now, gamma, weight, which, next, met);
            }
        }
        if (gamma == nullptr) return;
        if (!met) meet<S>();
    }

private:
    // A unit of the row, and this lane's four channels of it.
    struct Item {
        int unit, at;
        bool exists;

        __device__ __forceinline__ Item(const Residual& residual, int item) : unit(item) {
            const Share<S>& share = residual.share;
            const int channel = (share.first + unit) * S::UNIT + 4 * residual.lane;
            exists = channel < residual.step.hidden, at = min(channel, residual.step.hidden - 4);
        }
    };

    // The stream's channels of a unit, and what is to be added to them.
    __device__ __forceinline__ u16* stream(int unit) const { return reinterpret_cast<u16*>(shared + S::STREAM_AT) + unit * S::UNIT; }
    __device__ __forceinline__ u16* made(const Item& it) const { return stream(it.unit) + S::STREAM_CHANNELS; }
    __device__ __forceinline__ void send_squares(float* squares, const Item& it, float square, u32 round) const {
        square = warp_sum(square);
        if (lane == 0) send(squares_of(step, squares, share.group) + share.first + it.unit, square, round);
    }
    __device__ __forceinline__ void load(const u16* from, float (&values)[4]) const {
        const uint2 four = *reinterpret_cast<const uint2*>(from + 4 * lane);
        values[0] = widen_half<E, 0>(four.x), values[1] = widen_half<E, 1>(four.x);
        values[2] = widen_half<E, 0>(four.y), values[3] = widen_half<E, 1>(four.y);
    }
    __device__ __forceinline__ void store(u16* to, const float (&values)[4]) const {
        *reinterpret_cast<uint2*>(to + 4 * lane) = make_uint2(E::narrow(values[0], values[1]), E::narrow(values[2], values[3]));
    }
    // The norm's weights of those channels whose digits this lane makes.
    __device__ __forceinline__ void load_weight(const float* gamma, int unit, float (&weight)[4]) const {
        if (gamma == nullptr) return;
        const int at = min(channel_of_lane(share.first + unit, lane), step.hidden - 16 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[i] = gamma[at + i / 2 * 8 + i % 2];
    }
    __device__ __forceinline__ void add(const Item& it, float (&values)[4]) const {
        float old[4];
        load(stream(it.unit), old);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = it.exists ? rounded<E>(old[i] + values[i]) : 0.f;
    }
    // Stores a unit's new channels in the stream, computes their activations and sends their sum of squares; or stores the result.
    __device__ __forceinline__ void finish(const Item& it, const float (&now)[4], const float* gamma, const float (&weight)[4], int which, u32 next,
                                           bool& met) const {
        if (gamma == nullptr) {
            if (it.exists)
                *reinterpret_cast<uint2*>(step.result + it.at) = make_uint2(E::narrow(now[0], now[1]), E::narrow(now[2], now[3]));
            return;
        }
        u16* kept = stream(it.unit);
        store(kept, now);
        __syncwarp();
        float left[1][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) left[0][i] = E::widen(kept[lane / 4 * 16 + lane % 4 * 2 + i / 2 * 8 + i % 2]) * weight[i];
        if (!met) meet<S>();
        met = true;
        unsigned char* const places[1] = {shared + S::ACTIVATIONS_AT + it.unit * S::DIGIT_STRIDE};
        make_digits<S, Codec>(left, places, lane);
        float square = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) square = fmaf(now[i], now[i], square);
        send_squares(step.squares[which], it, square, next);
    }
};
