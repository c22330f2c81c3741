// New tokens of a gated delta net: convolution, rates, the matrix of each head, norm and gate, a block for a head of values.
//
//   c    = silu(sum over taps of weight[channel, tap] * input[tap])           of the head's query, key and value
//   q, k = c / |c|,  q /= sqrt(DK);   beta = scale * sigmoid(b);   g = exp(-exp(decay) * softplus(step + step_bias))
//   S    = g S;   S += k (beta (v - S^T k))^T;   o = S^T q;   out = rms(o) * weight * silu(gate)
//
// Thread (part, j) holds rows part * ROWS .. of column j of S [DK, DV] in registers, float32, requested before the previous
// kernel has ended: a step's first kernel begins when all of the step before is done. Inputs of the convolution lie in a ring of
// SLOTS tokens, position p at p % SLOTS, so the newest ones take places that are not read, and blocks that share a query and a
// key don't wait for each other; the first of them stores it.
//
// Usually each sequence has one token, and the state is replaced. Or the only sequence has several, rows of `x`: then the state
// behind each goes to `next`, from which the host later takes that of the last token which counts (ring: SLOTS >= TAPS - 1 + tokens).
//
// Columns of a row of `x` are turns of queries, keys, values and gates; those of `rates` turns of betas and steps. With INNER > 0
// a row of `rates` has INNER channels instead, the input of the projections of betas and steps: half of a block's threads multiply
// it by the row of weights of their head's beta, the others by that of its step. Rows of weights are requested early, as the state.
//
// BY_CHANNEL: a step, hence a decay, for each channel of a key, in `steps`; gates in `gates`, and their sigmoid for silu. All
// threads multiply the row of weights of the head's beta. The norm's result is rounded only behind the gate.
//
// Configuration: Element, DK, DV, TAPS, SLOTS, PARTS (threads that share a column; PARTS * DV is the block), ROWS = ceil(DK / PARTS),
// INNER (a multiple of 8), BY_CHANNEL.
#pragma once
#include "epilogue/activation.cuh"
#include "fault_site.cuh"
#include "ptx/approximate.cuh"
#include "ptx/launch.cuh"
#include "step/rows.cuh"

// Mirrored in kernels/step/delta.py.
struct DeltaNet {
    const u16 *x, *rates;
    u16* ring;
    float *state, *next;
    const float *weight, *decay, *step_bias;
    const u16* norm;
    const int* lengths;
    const uint4 *beta_weight, *step_weight;  // null unless INNER > 0
    const u16 *steps, *gates;                // null unless BY_CHANNEL
    i64 x_stride, rates_stride, out_stride, next_stride, steps_stride, gates_stride;
    int key_heads, value_heads, turns, tokens;
    float eps, beta_scale;
};

__device__ __forceinline__ float decay_of(float step, float rate) {
    const float softplus = step > 20.f ? step : log1pf(expf(step));
    return expf(-expf(rate) * softplus);
}

template <typename C>
__device__ __forceinline__ void delta(const DeltaNet& net, u16* out) {
    typedef typename C::Element E;
    constexpr int DK = C::DK, DV = C::DV, TAPS = C::TAPS, SLOTS = C::SLOTS, PARTS = C::PARTS, ROWS = C::ROWS;
    constexpr int THREADS = PARTS * DV, CHANNELS = 2 * DK + DV, WARPS = THREADS / 32;
    constexpr bool BY_CHANNEL = C::BY_CHANNEL;
    // Known at compilation, so that the keys of a thread are one address and constants, not ROWS addresses in registers.
    constexpr bool RAGGED = PARTS * ROWS != DK;
    // Threads that multiply one row of weights: half of them, or all where there are only betas.
    constexpr int INNER = C::INNER, HALF = BY_CHANNEL ? THREADS : THREADS / 2, VECTORS = INNER > 0 ? (INNER / 8 + HALF - 1) / HALF : 1;
    __shared__ float convolved[CHANNELS];
    __shared__ float decays[BY_CHANNEL ? DK : 1];
    __shared__ float sums[PARTS][DV];
    __shared__ float answers[PARTS][DV];
    __shared__ float key_sums[WARPS];
    __shared__ float query_sums[WARPS];
    __shared__ float norm_sums[WARPS];
    __shared__ float rate_sums[WARPS];
    launch_dependents();
    const int head = blockIdx.x % net.value_heads, group = net.value_heads / net.key_heads, key_head = head / group;
    const i64 row = blockIdx.x / net.value_heads;
    const int part = threadIdx.x / DV, column = threadIdx.x % DV;
    const i64 element = (row * net.value_heads + head) * DK * DV + column;
    const float* matrix = net.state + element;
    float s[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int key = part * ROWS + i;
        s[i] = !RAGGED || key < DK ? matrix[key * DV] : 0.f;
    }
    const int start = load_scalar(net.lengths + row);
    const int keys_each = net.key_heads / net.turns, values_each = net.value_heads / net.turns;
    const int key_turn = key_head / keys_each, value_turn = head / values_each;
    const int turn = 2 * keys_each * DK + 2 * values_each * DV;
    const int values_at = 2 * keys_each * DK + head % values_each * DV;
    const int rate = value_turn * 2 * values_each + head % values_each;
    const bool makes_beta = threadIdx.x < HALF;
    uint4 rate_weight[VECTORS];
    if constexpr (INNER > 0) {
        const uint4* from = (makes_beta ? net.beta_weight : net.step_weight) + (i64)rate * (INNER / 8);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int v = threadIdx.x % HALF + i * HALF;
            rate_weight[i] = v < INNER / 8 ? load_cached(from + v) : make_uint4(0, 0, 0, 0);
        }
    }
    FAULT_SITE(delta_waits, wait_for_previous_kernel();)
    const int all = (2 * net.key_heads) * DK + net.value_heads * DV;
    for (int token = 0; token < net.tokens; ++token) {
        const int position = start + token;
        const i64 new_row = row * net.tokens + token;
        const u16* given = net.x + new_row * net.x_stride;
        const u16* rates = net.rates + new_row * net.rates_stride;
        if constexpr (INNER > 0) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int v = threadIdx.x % HALF + i * HALF;
                if (v >= INNER / 8) continue;
                float a[8], b[8];
                widen_vector<E>(a, load_l2(reinterpret_cast<const uint4*>(rates) + v));
                widen_vector<E>(b, rate_weight[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum += a[j] * b[j];
            }
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0) rate_sums[threadIdx.x / 32] = sum;
        }
        for (int at = threadIdx.x; at < CHANNELS; at += THREADS) {
            const bool is_value = at >= 2 * DK, is_key = !is_value && at >= DK;
            const int channel = is_value ? at - 2 * DK : is_key ? at - DK : at;
            const int from = is_value ? value_turn * turn + values_at + channel
                                      : key_turn * turn + (key_head % keys_each + is_key * keys_each) * DK + channel;
            const int place = is_value ? 2 * net.key_heads * DK + head * DV + channel
                                       : (is_key * net.key_heads + key_head) * DK + channel;
            const u16 newest = load_scalar(given + from);
            u16* kept = net.ring + row * SLOTS * all + place;
            float total = 0.f;
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; ++tap) {
                const int before = position - (TAPS - 1) + tap;
                if (before < 0) continue;
                // The first block of a group may not have stored inputs of this launch yet.
                const u16* input = before < start ? kept + before % SLOTS * (i64)all : given + from - (position - before) * net.x_stride;
                total += net.weight[place * TAPS + tap] * E::widen(load_scalar(input));
            }
            total += net.weight[place * TAPS + TAPS - 1] * E::widen(newest);
            if (is_value || head % group == 0) kept[position % SLOTS * (i64)all] = newest;
            const float active = rounded<E>(total);
            convolved[at] = rounded<E>(activation<Activation::SILU>(active));
        }
        if constexpr (BY_CHANNEL) {
            for (int key = threadIdx.x; key < DK; key += THREADS) {
                const float step = E::widen(load_scalar(net.steps + new_row * net.steps_stride + head * DK + key));
                decays[key] = decay_of(step + net.step_bias[head * DK + key], net.decay[head]);
            }
        }
        float beta_logit = 0.f, step = 0.f;
        if constexpr (INNER == 0) {
            beta_logit = E::widen(load_scalar(rates + rate));
            if constexpr (!BY_CHANNEL) step = E::widen(load_scalar(rates + rate + values_each));
        }
        FAULT_SITE(convolved_there, __syncthreads();)
        if constexpr (INNER > 0) {
#pragma unroll
            for (int warp = 0; warp < HALF / 32; ++warp) {
                beta_logit += rate_sums[warp];
                if constexpr (!BY_CHANNEL) step += rate_sums[HALF / 32 + warp];
            }
            beta_logit = rounded<E>(beta_logit), step = rounded<E>(step);
        }
        const float beta = net.beta_scale * rounded<E>(fast_reciprocal(1.f + expf(-beta_logit)));
        float decay = 1.f;
        if constexpr (!BY_CHANNEL) decay = decay_of(step + net.step_bias[head], net.decay[head]);
        float query_square = 0.f, key_square = 0.f;
        for (int at = threadIdx.x; at < DK; at += THREADS) {
            query_square += convolved[at] * convolved[at];
            key_square += convolved[DK + at] * convolved[DK + at];
        }
        const float query_length = block_sum(query_square, query_sums), key_length = block_sum(key_square, key_sums);
        const float query_unit = 1.f / sqrtf((query_length + 1e-6f) * DK), key_unit = 1.f / sqrtf(key_length + 1e-6f);
        const float* queries = convolved;
        const float* keys = convolved + DK;
        float answer = 0.f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int key = part * ROWS + i;
            if (RAGGED && key >= DK) continue;
            if constexpr (BY_CHANNEL)
                s[i] *= decays[key];
            else
                s[i] *= decay;
            answer += s[i] * keys[key];
        }
        answers[part][column] = answer * key_unit;
        FAULT_SITE(answers_there, __syncthreads();)
        answer = 0.f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) answer += answers[i][column];
        const float correction = beta * (convolved[2 * DK + column] - answer) * key_unit;
        float* behind = net.next + token * net.next_stride + element;
        float result = 0.f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int key = part * ROWS + i;
            if (RAGGED && key >= DK) continue;
            s[i] += keys[key] * correction;
            behind[key * DV] = s[i];
            result += s[i] * queries[key];
        }
        sums[part][column] = result * query_unit;
        __syncthreads();
        result = 0.f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) result += sums[i][column];
        result = rounded<E>(result);
        const float mean = block_sum(part == 0 ? result * result : 0.f, norm_sums) / DV;
        if (part == 0) {
            float y = result * fast_reciprocal_root(mean + net.eps);
            if constexpr (BY_CHANNEL) {
                const float gate = E::widen(load_scalar(net.gates + new_row * net.gates_stride + head * DV + column));
                y = y * E::widen(net.norm[column]) * fast_reciprocal(1.f + expf(-gate));
            } else {
                const float gate = E::widen(load_scalar(given + value_turn * turn + values_at + values_each * DV + column));
                y = rounded<E>(rounded<E>(y) * E::widen(net.norm[column])) * activation<Activation::SILU>(gate);
            }
            out[new_row * net.out_stride + head * DV + column] = (u16)E::narrow(y, 0.f);
        }
        // The next token may write to shared memory: all threads have read it, since block_sum has waited for them.
    }
}

// ptxas saves registers where one more block then fits, and spills for it; more than 512 threads have 80 registers either way.
#define INSTANTIATE_STEP_DELTA(NAME, CONFIGURATION)                                                                        \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::PARTS* CONFIGURATION::DV,                                  \
                                                 CONFIGURATION::PARTS* CONFIGURATION::DV > 512 ? 0 : 1)                    \
    NAME(DeltaNet net, u16* out) {                                                                                         \
        delta<CONFIGURATION>(net, out);                                                                                    \
    }
