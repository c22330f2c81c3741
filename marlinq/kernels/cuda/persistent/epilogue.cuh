// Sums to messages. A few warps of a block take sets of tiles in turn: each adds what its block's warps left and sends it. What
// qkv, o and down give is added by whoever needs it. What gate_up gives is exchanged with the blocks of the same columns: part
// p of K owns columns 16 p .. 16 p + 15 of a tile, applies the activation to them, and sends them on. Several warps, because an
// exchange is a trip through L2.
#pragma once
#include "persistent/products.cuh"
#include "persistent/residual.cuh"

template <typename S, typename Codec>
struct Epilogue {
    typedef typename Codec::Element E;
    static constexpr int ROWS = S::ROWS;
    static constexpr int PAIRS = S::WIDEST;  // of tiles in a set; lane l has columns 4 l .. 4 l + 3 of each

    const StepArguments& step;
    const Plan<S>& plan;
    const unsigned char* shared;
    Ring<Slots<S>> slots;  // at this warp's, which is its only one
    int part, lane;
    int turn;  // sets until it is this warp's turn

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
    __device__ __forceinline__ void product(const StepLayer& layer, int P, u32 round) {
        const Share<S>& share = plan.shares[P];
        float root = 0.f;
        TileSet<S> set;
#pragma unroll 1
        for (int at = 0; at < share.tiles; at += 1 << set.log) {
            set = share.set(at);
            if (turn-- > 0) continue;
            turn = S::SLOTS - 1;
            if (root == 0.f) root = before(P, round);
            finish(layer, P, round, set, share.first_tile + at, root);
        }
    }
    // What a warp waits for before it sends sums; their factor.
    __device__ __forceinline__ float before(int P, u32 round) const {
        if (P == DOWN) {
            // No block may send what others have not read yet two layers later: when down's sums are sent, all blocks have got
            // as far as gate_up, and with it have read all earlier sums.
#pragma unroll 1
            for (int block = lane; block < (int)gridDim.x; block += 32) {
                Letters<1, 1> letter;
                float found[1][1];
                letter.request(0, step.arrivals + block);
                letter.await(round, found);
            }
            __syncwarp();
        }
        return ROWS == 1 && (P == QKV || P == GATE_UP) ? root_of_row(step, P == GATE_UP, 0, round, lane) : 1.f;
    }
    __device__ __forceinline__ void finish(const StepLayer& layer, int P, u32 round, const TileSet<S>& set, int first_tile, float root) {
        const int contributions = set.contributions(), N = step.shape[P].tiles * 64, column = 4 * (lane % 16);
        const bool gated = P == GATE_UP, owner = lane % 16 / 4 == part;
        float* parts = step.parts[P];
        float own[PAIRS][ROWS][4];
        const int mark = 16 * P + 4 * (first_tile / 4 % 4), kind = 1 + slots.stage;
        MARK(kind, mark)
        slots.wait_full();
        MARK(kind, mark + 1)
        const float* left = reinterpret_cast<const float*>(shared + S::SLOTS_AT + slots.stage * S::SLOT_BYTES) + column;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int tile = 2 * i + lane / 16;
            const bool exists = tile >> set.log == 0;
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                float sum[4] = {};
                if (exists && m < step.rows) {
#pragma unroll(ROWS == 1 ? 4 : 1)
                    for (int c = 0; c < contributions; ++c) {
                        const float4 four = *reinterpret_cast<const float4*>(left + (((c << set.log) + tile) * ROWS + m) * S::PITCH);
                        sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
                    }
#pragma unroll
                    for (int n = 0; n < 4; ++n) sum[n] *= root;
                    if (!gated || !owner) send(parts + ((i64)part * step.rows + m) * N + (first_tile + tile) * 64 + column, sum, round);
                }
#pragma unroll
                for (int n = 0; n < 4; ++n) own[i][m][n] = sum[n];
            }
        }
        __syncwarp();
        if (lane == 0) slots.release();
        slots.parity ^= 1;
        MARK(kind, mark + 2)
        if (gated) exchange(layer, round, set, first_tile, own);
        MARK(kind, mark + 3)
    }
    // The block's own columns of gate and up, from all parts.
    __device__ __forceinline__ void exchange(const StepLayer& layer, u32 round, const TileSet<S>& set, int first_tile, const float (&own)[PAIRS][ROWS][4]) {
        const int N = step.shape[GATE_UP].tiles * 64, column = 4 * (lane % 16);
        const u16* bias = layer.bias[GATE_UP];
        const bool owner = lane % 16 / 4 == part;
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            if (m >= step.rows) break;
            Letters<PAIRS*(PARTS - 1), 4> letters;
            float theirs[PAIRS * (PARTS - 1)][4];
            if (owner) {
#pragma unroll
                for (int i = 0; i < PAIRS; ++i)
#pragma unroll
                    for (int p = 0; p < PARTS - 1; ++p) {
                        // Pairs behind the last repeat it.
                        const int tile = (2 * i >> set.log == 0 ? 2 * i : 0) + lane / 16;
                        letters.request(i * (PARTS - 1) + p, step.parts[GATE_UP] + ((i64)(p + (p >= part)) * step.rows + m) * N + (first_tile + tile) * 64 + column);
                    }
                letters.await(round, theirs);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int tile = 2 * i + lane / 16;
                const bool exists = tile >> set.log == 0;
                float result[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    float sum = 0.f;
#pragma unroll
                    for (int p = 0; p < PARTS; ++p)
                        sum += p == part ? own[i][m][n] : p < part ? theirs[i * (PARTS - 1) + min(p, PARTS - 2)][n] : theirs[i * (PARTS - 1) + max(p - 1, 0)][n];
                    const float shift = bias != nullptr && exists ? E::widen(bias[(first_tile + tile) * 64 + column + n]) : 0.f;
                    result[n] = rounded<E>(sum + shift);
                }
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const float up = shuffle(result[n], lane ^ 16);
                    result[n] = rounded<E>(activate(result[n])) * up;
                }
                if (owner && lane < 16 && exists) send(step.mlp + (i64)m * (N / 2) + (first_tile / 2 + i) * 64 + column, result, round);
            }
        }
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
