// Sends sums as messages. A few warps of a block take sets of tiles in turn; each adds the sums that the block's other warps left,
// and sends the result. Partial sums of qkv, o and down are added by the blocks that read them. Partial sums of gate_up are
// exchanged among the blocks of the same columns: part p of K owns columns 16 p .. 16 p + 15 of a tile, adds them, applies the
// activation, and sends the result. Several warps take turns because an exchange waits for a trip through L2.
#pragma once
#include "persistent/products.cuh"
#include "persistent/residual.cuh"

template <typename S, typename Codec>
struct Epilogue {
    typedef typename Codec::Element E;
    static constexpr int PAIRS = S::WIDEST;  // pairs of tiles in a set; lane l has columns 4 l .. 4 l + 3 of each

    const StepArguments& step;
    const Plan<S>& plan;
    const unsigned char* shared;
    const float* roots;    // factor of each slot's sums
    Ring<Slots<S>> slots;  // at this warp's only slot
    int part, lane;
    int turn;  // sets until it is this warp's turn

    __device__ __forceinline__ Epilogue(const StepArguments& arguments, const Plan<S>& block_plan, const unsigned char* memory, const float* slot_roots,
                                        const Ring<Slots<S>>& all, int warp, int this_lane)
        : step(arguments), plan(block_plan), shared(memory), roots(slot_roots), slots(all), part(blockIdx.x % PARTS), lane(this_lane), turn(warp) {
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
        TileSet<S> set;
#pragma unroll 1
        for (int at = 0; at < share.tiles; at += set.tiles()) {
            set = share.set(at);
            if (turn-- > 0) continue;
            turn = S::SLOTS - 1;
            finish(layer, P, round, set, share.first_tile + at);
        }
    }
    __device__ __forceinline__ int column() const { return 4 * (lane % 16); }
    __device__ __forceinline__ int tile_of_pair(int i) const { return 2 * i + lane / 16; }
    __device__ __forceinline__ bool owns() const { return lane % 16 / 4 == part; }
    // This lane's sums of pair i, always in the same order.
    __device__ __forceinline__ void add(const TileSet<S>& set, int i, float root, float (&sum)[4]) const {
        const float* left = reinterpret_cast<const float*>(shared + S::SLOTS_AT + slots.stage * S::SLOT_BYTES) + column();
        const int contributions = set.contributions(), tile = tile_of_pair(i);
#pragma unroll
        for (int n = 0; n < 4; ++n) sum[n] = 0.f;
#pragma unroll(4)
        for (int c = 0; c < contributions; ++c) {
            const float4 four = *reinterpret_cast<const float4*>(left + ((c << set.log) + tile) * 64);
            sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) sum[n] *= root;
    }
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (lane == 0) slots.release();
        slots.parity ^= 1;
    }
    __device__ __forceinline__ void finish(const StepLayer& layer, int P, u32 round, const TileSet<S>& set, int first_tile) {
        const int N = step.shape[P].tiles * 64;
        const bool gated = P == GATE_UP;
        float* parts = step.parts[P] + (i64)part * N + first_tile * 64 + column();
        slots.wait_full();
        const float root = roots[slots.stage];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int tile = tile_of_pair(i);
            if (tile >> set.log != 0 || (gated && owns())) continue;
            float sum[4];
            add(set, i, root, sum);
            send(parts + tile * 64, sum, round);
        }
        if (gated)
            exchange(layer, round, set, first_tile, root);
        else
            release();
    }
    // Adds the block's own columns of gate and up from all parts, and sends activation(gate) * up.
    __device__ __forceinline__ void exchange(const StepLayer& layer, u32 round, const TileSet<S>& set, int first_tile, float root) {
        const int N = step.shape[GATE_UP].tiles * 64;
        const u16* bias = layer.bias[GATE_UP];
        Letters<PAIRS*(PARTS - 1), 4> letters;
        float own[PAIRS][4];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const bool exists = 2 * i >> set.log == 0;
#pragma unroll
            for (int p = 0; p < PARTS - 1; ++p) {
                const int at = i * (PARTS - 1) + p;
                if (exists && owns())
                    letters.request(at, step.parts[GATE_UP] + (i64)(p + (p >= part)) * N + (first_tile + tile_of_pair(i)) * 64 + column());
                else
                    letters.omit(at, round);
            }
            if (exists && owns()) add(set, i, root, own[i]);
        }
        release();
        await(round, letters);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int tile = tile_of_pair(i);
            const bool exists = tile >> set.log == 0;
            float result[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float sum = 0.f;
#pragma unroll
                for (int p = 0; p < PARTS; ++p)
                    sum += p == part ? own[i][n] : letters.value(i * (PARTS - 1) + (p < part ? min(p, PARTS - 2) : max(p - 1, 0)), n);
                const float shift = bias != nullptr && exists ? E::widen(bias[(first_tile + tile) * 64 + column() + n]) : 0.f;
                result[n] = rounded<E>(sum + shift);
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float up = shuffle(result[n], lane ^ 16);
                result[n] = rounded<E>(activate(result[n])) * up;
            }
            if (owns() && lane < 16 && exists) send(step.mlp + (first_tile / 2 + i) * 64 + column(), result, round);
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
