// A new token of a Mamba-2 mixer: convolution, step, the matrix of each head, gate and norm, a block for COLUMNS channels of a head.
//
//   c    = silu(bias + sum over taps of weight[channel, tap] * input[tap])          of the block's values x, and its group's B and C
//   dt   = clamp(softplus(step + step_bias));   S = exp(dt A) S + dt B x^T;   y = S^T C + D x
//   out  = rms(y * silu(gate)) * weight, or rms(y) * weight * silu(gate), or y * silu(gate)
//
// Thread (part, four) holds rows part, part + PARTS, .. of four columns of S [N, P] in registers, float32, requested before the
// previous kernel has ended: a step's first kernel begins when all of the step before is done. Inputs of the convolution lie in a
// ring of TAPS tokens, position p at p % TAPS, so the newest one takes the place of one that is not read, and blocks that share B
// and C don't wait for each other; the first of them stores it.
//
// Channels that are normalised together belong to several blocks. Each writes its results and the sum of their squares, and the
// block that finishes last of them adds up the squares, in order, normalises, and resets their counter.
//
// A row of `x` holds gates, values, keys (B), queries (C) and steps.
//
// Configuration: Element, N, P, COLUMNS, PARTS (threads that share a column; PARTS * COLUMNS / 4 is the block), ROWS = ceil(N / PARTS),
// TAPS, GATING.
#pragma once
#include "epilogue/activation.cuh"
#include "fault_site.cuh"
#include "ptx/approximate.cuh"
#include "ptx/flags.cuh"
#include "ptx/launch.cuh"
#include "step/rows.cuh"

// The norm stands before the product with the gate, or behind it, or there is none.
enum class Gating { NORM_FIRST, NORM_BEHIND, ALONE };

// Mirrored in kernels/step/mamba.py.
struct MambaMixer {
    const u16* x;
    u16* ring;
    float* state;
    const float *weight, *bias, *rates, *step_bias, *skip, *norm;
    const int* lengths;
    float *results, *squares;
    u32* counters;
    i64 x_stride, out_stride;
    int heads, groups, norm_width;
    float eps, least_step, most_step, gate_scale, step_scale, result_scale;
};

template <typename C>
__device__ __forceinline__ void mamba(const MambaMixer& mixer, u16* out) {
    typedef typename C::Element E;
    constexpr int N = C::N, P = C::P, COLUMNS = C::COLUMNS, PARTS = C::PARTS, ROWS = C::ROWS, TAPS = C::TAPS;
    constexpr int FOURS = COLUMNS / 4, THREADS = PARTS * FOURS, SPLITS = P / COLUMNS, CHANNELS = COLUMNS + 2 * N;
    constexpr bool NORMS = C::GATING != Gating::ALONE;
    __shared__ float convolved[CHANNELS];
    __shared__ float4 sums[PARTS][FOURS];
    __shared__ float square_sums[THREADS / 32];
    __shared__ float group_sums[THREADS / 32];
    __shared__ u32 arrived;
    launch_dependents();
    const int split = blockIdx.x % SPLITS, head = blockIdx.x / SPLITS % mixer.heads;
    const i64 row = blockIdx.x / SPLITS / mixer.heads;
    const int part = threadIdx.x / FOURS, four = threadIdx.x % FOURS;
    float4* matrix = reinterpret_cast<float4*>(mixer.state + (row * mixer.heads + head) * N * P + split * COLUMNS) + four;
    float4 s[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int key = i * PARTS + part;
        s[i] = key < N ? matrix[key * (P / 4)] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    const int position = load_scalar(mixer.lengths + row);
    const int width = mixer.heads * P, keys = mixer.groups * N, all = width + 2 * keys;
    const int group_heads = mixer.heads / mixer.groups, group = head / group_heads, first = head * P + split * COLUMNS;
    FAULT_SITE(mamba_waits, wait_for_previous_kernel();)
    const u16* given = mixer.x + row * mixer.x_stride;
    for (int at = threadIdx.x; at < CHANNELS; at += THREADS) {
        const int key = at - COLUMNS;
        const int place = key < 0 ? first + at : width + group * N + (key < N ? key : key - N + keys);
        const u16 newest = load_scalar(given + width + place);
        u16* kept = mixer.ring + row * TAPS * all + place;
        float total = mixer.bias[place];
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; ++tap) {
            const int before = position - (TAPS - 1) + tap;
            if (before >= 0) total += mixer.weight[place * TAPS + tap] * E::widen(load_scalar(kept + before % TAPS * (i64)all));
        }
        total += mixer.weight[place * TAPS + TAPS - 1] * E::widen(newest);
        if (key < 0 || (split == 0 && head % group_heads == 0)) kept[position % TAPS * (i64)all] = newest;
        convolved[at] = rounded<E>(activation<Activation::SILU>(rounded<E>(total)));
    }
    const float raw = E::widen(load_scalar(given + width + all + head)) * mixer.step_scale + mixer.step_bias[head];
    const float softplus = raw > 20.f ? raw : log1pf(expf(raw));
    const float step = fminf(fmaxf(softplus, mixer.least_step), mixer.most_step), decay = expf(mixer.rates[head] * step);
    FAULT_SITE(mamba_convolved, __syncthreads();)
    const float* values = convolved + 4 * four;
    const float v[4] = {step * values[0], step * values[1], step * values[2], step * values[3]};
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int key = i * PARTS + part;
        if (key >= N) continue;
        const float b = convolved[COLUMNS + key], c = convolved[COLUMNS + N + key];
        s[i].x = decay * s[i].x + b * v[0], s[i].y = decay * s[i].y + b * v[1];
        s[i].z = decay * s[i].z + b * v[2], s[i].w = decay * s[i].w + b * v[3];
        matrix[key * (P / 4)] = s[i];
        sum.x += c * s[i].x, sum.y += c * s[i].y, sum.z += c * s[i].z, sum.w += c * s[i].w;
    }
    sums[part][four] = sum;
    FAULT_SITE(mamba_summed, __syncthreads();)
    const auto silu_of_gate = [&](int channel) {
        return activation<Activation::SILU>(mixer.gate_scale * E::widen(load_scalar(given + channel)));
    };
    float y = 0.f;
    if (threadIdx.x < COLUMNS) {
        const float* column = reinterpret_cast<const float*>(sums) + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < PARTS; ++i) y += column[i * COLUMNS];
        y += mixer.skip[head] * convolved[threadIdx.x];
        if (C::GATING != Gating::NORM_FIRST) y *= silu_of_gate(first + threadIdx.x);
        if (NORMS)
            mixer.results[row * width + first + threadIdx.x] = y;
        else
            out[row * mixer.out_stride + first + threadIdx.x] = (u16)E::narrow(mixer.result_scale * y, 0.f);
    }
    if constexpr (NORMS) {
        const int blocks = mixer.norm_width / COLUMNS, norm_group = first / mixer.norm_width;
        const int work = row * (width / mixer.norm_width) + norm_group;
        const float square = block_sum(y * y, square_sums);
        if (threadIdx.x == 0) mixer.squares[row * (width / COLUMNS) + first / COLUMNS] = square;
        __syncthreads();
        if (threadIdx.x == 0) {
            arrived = add_acquire_release(mixer.counters + work, 1);
            if (arrived == blocks - 1) store_relaxed(mixer.counters + work, 0);
        }
        FAULT_SITE(mamba_arrived, __syncthreads();)
        if (arrived != blocks - 1) return;
        const int from = norm_group * mixer.norm_width;
        const u32* squares = reinterpret_cast<const u32*>(mixer.squares + row * (width / COLUMNS) + from / COLUMNS);
        float total = 0.f;
        for (int i = threadIdx.x; i < blocks; i += THREADS) total += __uint_as_float(load_l2_word(squares + i));
        const float mean = block_sum(total, group_sums) / mixer.norm_width;
        const float scale = mixer.result_scale * fast_reciprocal_root(mean + mixer.eps);
#pragma unroll 4
        for (int channel = from + 4 * threadIdx.x; channel < from + mixer.norm_width; channel += 4 * THREADS) {
            const uint4 found = load_l2(mixer.results + row * width + channel);
            const float4 weight = *reinterpret_cast<const float4*>(mixer.norm + channel);
            float x[4] = {scale * __uint_as_float(found.x) * weight.x, scale * __uint_as_float(found.y) * weight.y,
                          scale * __uint_as_float(found.z) * weight.z, scale * __uint_as_float(found.w) * weight.w};
            if (C::GATING == Gating::NORM_FIRST) {
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] *= silu_of_gate(channel + i);
            }
            store_global(out + row * mixer.out_stride + channel, make_uint2(E::narrow(x[0], x[1]), E::narrow(x[2], x[3])));
        }
    }
}

#define INSTANTIATE_STEP_MAMBA(NAME, CONFIGURATION)                                                     \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::PARTS* CONFIGURATION::COLUMNS / 4)      \
    NAME(MambaMixer mixer, u16* out) {                                                                  \
        mamba<CONFIGURATION>(mixer, out);                                                               \
    }
