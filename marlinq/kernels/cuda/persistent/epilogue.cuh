// Sums to results. A few warps of a block take pairs of tiles in turn: each adds what its block's warps left, exchanges it
// with the blocks of the same columns, and does what follows the product. Part p of K owns columns 16 p .. 16 p + 15 of a tile.
// Several warps, because an exchange is a trip through L2.
#pragma once
#include "persistent/products.cuh"

template <typename S, typename Codec>
struct Epilogue {
    typedef typename Codec::Element E;
    static constexpr int ROWS = S::ROWS;

    const StepArguments& step;
    const Plan<S>& plan;
    const unsigned char* shared;
    Ring<Slots<S>> slots;  // at this warp's, which is its only one
    int part, lane;
    int turn;  // pairs until it is this warp's turn

    __device__ __forceinline__ Epilogue(const StepArguments& arguments, const Plan<S>& block_plan, const unsigned char* memory, const Ring<Slots<S>>& all,
                                        int warp, int this_lane)
        : step(arguments), plan(block_plan), shared(memory), slots(all), part(blockIdx.x % PARTS), lane(this_lane), turn(warp) {
        slots.advance(warp);
    }

    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (int l = 0; l < step.layer_count; ++l) {
            const StepLayer& layer = step.layers[l];
#pragma unroll 1
            for (int p = QKV; p < PRODUCTS; ++p) product(layer, p, l);
        }
    }

private:
    // Columns lane and lane + 32 of a pair of tiles, always in the same order.
    __device__ __forceinline__ void add(float (&sums)[2][2][ROWS], int contributions) {
        slots.wait_full();
        const float* left = reinterpret_cast<const float*>(shared + S::SLOTS_AT + slots.stage * S::SLOT_BYTES) + lane;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int m = 0; m < ROWS; ++m) sums[tile][0][m] = sums[tile][1][m] = 0.f;
#pragma unroll(ROWS == 1 ? 8 : 1)
        for (int c = 0; c < contributions; ++c)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int m = 0; m < ROWS; ++m)
                    if (m < step.rows) {
                        const float* row = left + tile * (S::TILE_SUM_BYTES / 4) + (c * ROWS + m) * S::PITCH;
                        sums[tile][0][m] += row[0], sums[tile][1][m] += row[32];
                    }
        __syncwarp();
        if (lane == 0) slots.release();
        slots.parity ^= 1;
    }

    __device__ __forceinline__ void product(const StepLayer& layer, int P, u32 round) {
        const Share<S> share = plan.shares[P];
        const int contributions = min(S::TEAMS, share.stages) * S::TEAM, N = step.shape[P].tiles * 64;
        const bool streams = P == OUTPUT || P == DOWN;
        const u32 next = P == DOWN ? round + 1 : round;  // of the residual stream
        float* parts = step.parts[P];
        int pair = turn;
        for (; 2 * pair < share.tiles; pair += S::SLOTS) {
            const bool both = 2 * pair + 1 < share.tiles;
            const int tiles[2] = {share.tile(2 * pair), share.tile(both ? 2 * pair + 1 : 2 * pair)};
            // Own columns: of the first tile in the lower half of the warp.
            const bool mine = lane < 16 || both;
            const int own = (lane < 16 ? tiles[0] : tiles[1]) * 64 + 16 * part + lane % 16;
            float shift = 0.f, before[ROWS][1];
            if (P != QKV && layer.bias[P] != nullptr) shift = E::widen(layer.bias[P][own]);
            Letters<ROWS, 1> stream;
            if (streams) {
                // The residual stream, which this block itself has sent.
#pragma unroll
                for (int m = 0; m < ROWS; ++m) stream.request(m, (P == OUTPUT ? step.stream : step.middle) + (i64)min(m, step.rows - 1) * N + own);
                stream.await(round, before);
            }
            float sums[2][2][ROWS];
            const int mark = 16 * P + 4 * min(pair / S::SLOTS, 3), kind = 1 + slots.stage;
            MARK(kind, mark)
            add(sums, contributions);
            MARK(kind, mark + 1)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool to_others = (P == QKV || 2 * half + lane / 16 != part) && (tile == 0 || both);
#pragma unroll
                    for (int m = 0; m < ROWS; ++m)
                        if (to_others && m < step.rows)
                            send(parts + ((i64)part * step.rows + m) * N + tiles[tile] * 64 + 32 * half + lane, sums[tile][half][m], round);
                }
            MARK(kind, mark + 2)
            if (P == QKV) continue;
            constexpr int AT_ONCE = ROWS < 4 ? ROWS : 4;
#pragma unroll
            for (int from = 0; from < ROWS; from += AT_ONCE) {
                if (from >= step.rows) break;
                Letters<AT_ONCE*(PARTS - 1), 1> letters;
                float theirs[AT_ONCE * (PARTS - 1)][1];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
                    for (int p = 0; p < PARTS - 1; ++p)
                        letters.request(i * (PARTS - 1) + p, parts + ((i64)(p + (p >= part)) * step.rows + min(from + i, step.rows - 1)) * N + own);
                letters.await(round, theirs);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int m = from + i;
                    const float first = part < 2 ? sums[0][0][m] : sums[0][1][m], second = part < 2 ? sums[1][0][m] : sums[1][1][m];
                    const int source = part % 2 * 16 + lane % 16;
                    const float of_first = shuffle(first, source), of_second = shuffle(second, source);
                    const float here = lane < 16 ? of_first : of_second;
                    float sum = 0.f;
#pragma unroll
                    for (int p = 0; p < PARTS; ++p)
                        sum += p == part ? here : p < part ? theirs[i * (PARTS - 1) + min(p, PARTS - 2)][0] : theirs[i * (PARTS - 1) + max(p - 1, 0)][0];
                    const float result = rounded<E>(sum + shift);
                    const bool exists = mine && m < step.rows;
                    if (streams) {
                        const float now = rounded<E>(before[m][0] + result);
                        float square = now * now;
#pragma unroll
                        for (int distance = 8; distance > 0; distance /= 2) square += shuffle(square, lane ^ distance);
                        if (exists) {
                            send((P == OUTPUT ? step.middle : step.stream) + (i64)m * N + own, now, next);
                            if (lane % 16 == 0)
                                send((P == OUTPUT ? step.middle_squares : step.stream_squares) + (i64)m * (N / 16) + own / 16, square, next);
                            if (P == DOWN && next == (u32)step.layer_count) step.result[(i64)m * N + own] = (u16)E::narrow(now, now);
                        }
                    } else {
                        const float up = shuffle(result, lane ^ 16);
                        if (lane < 16 && exists)
                            send(step.mlp + (i64)m * (N / 2) + tiles[0] / 2 * 64 + 16 * part + lane, rounded<E>(activate(result)) * up, round);
                    }
                }
            }
            MARK(kind, mark + 3)
        }
        turn = pair - (share.tiles + 1) / 2;
    }
    static __device__ __forceinline__ float shuffle(float value, int lane) {
        return __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(value), lane));
    }
    __device__ __forceinline__ float activate(float x) const {
        if (step.activation == SILU) return x * fast_reciprocal(1.f + fast_exp2(-1.44269504f * x));
        // GELU's tanh form: 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)).
        const float u = 0.7978845608f * (x + 0.044715f * x * x * x);
        return x * fast_reciprocal(1.f + fast_exp2(-2.88539008f * u));
    }
};
