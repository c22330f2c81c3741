// What an epilogue does with whole rows of a product's result beside storing them, so that the residual stream and its RMS norm
// need no kernel of their own (docs/decode.md, "Residual and norm between products").
//
//   behind a norm:    sum[m, n] *= unit / sqrt(mean of squares of row m + eps)       the activations were weight * x, not yet normalised
//   residual stream:  r = residual[m, n] + factor * sum[m, n], rounded;  stored[m, n] = r;  out[m, n] = weight[n] * r;
//                     squares[m, n / 64] = sum of r * r over 64 columns, always in the same order
#pragma once
#include "ptx/memory.cuh"
#include "step/rows.cuh"

// Nothing of it.
struct PlainRows {
    static constexpr bool WHOLE_WARPS = false;
    __device__ __forceinline__ void scale(float4&, int) const {}
    template <typename E>
    __device__ __forceinline__ void add(float4&, int, int, bool, bool) const {}
};

// Where the work's operands are.
struct RowOperands {
    const float *squares;  // [M][parts], of the activations
    int parts;
    float unit, eps, inverse_width;
    const u16* residual;   // [M][residual_stride]
    const float4* weight;  // [N / 4]
    u16* stored;           // as residual
    float* squares_out;    // [M][N / 64]
    i64 residual_stride;
    float factor;
};

template <bool NORMED, bool ADDS, int TileM, int TileN, int Threads>
struct RowEpilogue {
    static_assert(!ADDS || TileN % 64 == 0, "squares are summed over 64 columns, which 16 lanes have");
    static constexpr bool WHOLE_WARPS = ADDS;
    const RowOperands& given;
    float* factors;  // of the tile's rows, shared
    int N;
    uint2 residual;
    float4 weight;

    // Behind the wait for the previous kernel, before the product: what the epilogue needs is requested, and the rows' factors
    // go to shared memory. `rank` is the block's of its cluster.
    __device__ __forceinline__ void begin(int m0, int n0, u32 rank, int rows) {
        if constexpr (ADDS) {
            const int four = rank * Threads + threadIdx.x, m = four / (TileN / 4), n = n0 + four % (TileN / 4) * 4;
            if (m < rows && n < N) load(m0 + m, n);
        }
        if constexpr (NORMED) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int first = 0; first < TileM; first += Threads / 32) {
                const int m = first + threadIdx.x / 32;
                if (m >= rows) break;
                const float* squares = given.squares + (i64)(m0 + m) * given.parts;
                float sum = 0.f;
                for (int part = lane; part < given.parts; part += 32) sum += load_scalar(squares + part);
                sum = warp_sum(sum);
                if (lane == 0) factors[m] = given.unit / sqrtf(sum * given.inverse_width + given.eps);
            }
        }
    }
    __device__ __forceinline__ void load(int m, int n) {
        const u32* from = reinterpret_cast<const u32*>(given.residual + m * given.residual_stride + n);
        residual = make_uint2(load_l2_word(from), load_l2_word(from + 1));
        weight = given.weight[n / 4];
    }

    // Four sums of the tile's row m.
    __device__ __forceinline__ void scale(float4& sum, int m) const {
        if constexpr (NORMED) {
            const float by = factors[m];
            sum.x *= by, sum.y *= by, sum.z *= by, sum.w *= by;
        }
    }
    // Four results of row m, columns n .. n + 3, by 16 lanes that have 64 columns together. The `first` ones have been requested;
    // a lane without results, not `mine`, adds nothing.
    template <typename E>
    __device__ __forceinline__ void add(float4& sum, int m, int n, bool first, bool mine) {
        if constexpr (ADDS) {
            float a = 0.f, b = 0.f, c = 0.f, d = 0.f;
            if (mine) {
                if (!first) load(m, n);
                const uint2 kept = make_uint2(E::narrow(fmaf(given.factor, sum.x, widen_half<E, 0>(residual.x)),
                                                        fmaf(given.factor, sum.y, widen_half<E, 1>(residual.x))),
                                              E::narrow(fmaf(given.factor, sum.z, widen_half<E, 0>(residual.y)),
                                                        fmaf(given.factor, sum.w, widen_half<E, 1>(residual.y))));
                store_global(given.stored + m * given.residual_stride + n, kept);
                a = widen_half<E, 0>(kept.x), b = widen_half<E, 1>(kept.x);
                c = widen_half<E, 0>(kept.y), d = widen_half<E, 1>(kept.y);
                sum = make_float4(a * weight.x, b * weight.y, c * weight.z, d * weight.w);
            }
            float squares = a * a + b * b + c * c + d * d;
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int distance = 8; distance > 0; distance /= 2) squares += of_lane(squares, lane ^ distance);
            if (mine && lane % 16 == 0) given.squares_out[(i64)m * (N / 64) + n / 64] = squares;
        }
    }
};
