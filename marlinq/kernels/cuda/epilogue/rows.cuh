// Epilogues that also apply an RMS norm to a product's results, or add them to the residual stream, so that these need no kernel of
// their own (docs/decode.md, "The chain").
//
//   behind a norm:    sum[m, n] *= unit / sqrt(mean of squares of row m + eps)       the activations were weight * x, not yet normalised
//   residual stream:  r = residual[m, n] + factor * sum[m, n], rounded;  stored[m, n] = r;  out[m, n] = weight[n] * r;
//                     squares[m, n / 64] = sum of r * r over 64 columns, always in the same order
//
// Where sums are pushed (reduce/dsmem_push.cuh) a warp has 16 columns of a row, so squares are summed over those.
#pragma once
#include "fault_site.cuh"
#include "ptx/memory.cuh"
#include "step/rows.cuh"

// No work on rows, for either way in which sums meet.
struct PlainRows {
    static constexpr bool NORMED = false, ADDS = false, WHOLE_WARPS = false;
    struct Addend {};
    __device__ __forceinline__ Addend request(int, int, u32, int) const { return {}; }
    __device__ __forceinline__ void scale(float4&, int) const {}
    __device__ __forceinline__ void scale(float (&)[4], int, int) const {}
    template <typename E>
    __device__ __forceinline__ void add(float4&, int, int, bool, bool) const {}
};

// Operands of norm and residual stream.
struct RowOperands {
    const float *squares;  // [M][parts], partial sums of squares of the activations
    int parts;
    float unit, eps, inverse_width;
    const u16* residual;   // [M][residual_stride]
    const float4* weight;  // [N / 4]
    u16* stored;           // as residual
    float* squares_out;    // [M][N / 64], or [M][N / 16]
    i64 residual_stride;
    float factor;
};

// Computes the factors of a tile's rows into shared memory, by `Warps` warps of which this is number `warp`. Loads of several rows
// are requested at once, to hide their latency.
template <int TileM, int Warps>
__device__ __forceinline__ void share_factors(const RowOperands& given, int m0, int rows, float* factors, int warp) {
    // With large tiles fewer at once, since these warps have given registers to those that multiply.
    constexpr bool FEW_REGISTERS = TileM > 32;
    constexpr int MINE = (TileM + Warps - 1) / Warps, MOST = FEW_REGISTERS ? 4 : 6, ROWS = MINE < MOST ? MINE : MOST;
    constexpr int AT_ONCE = FEW_REGISTERS ? 2 : 4;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int begin = warp; begin < rows; begin += ROWS * Warps) {
        const float* squares = given.squares + (i64)(m0 + begin) * given.parts;
        float sums[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sums[i] = 0.f;
#pragma unroll 1
        for (int first = lane; first < given.parts; first += 32 * AT_ONCE) {
            float part[AT_ONCE][ROWS];
#pragma unroll
            for (int p = 0; p < AT_ONCE; ++p)
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const bool exists = first + 32 * p < given.parts && begin + i * Warps < rows;
                    part[p][i] = exists ? load_scalar(squares + (i64)(i * Warps) * given.parts + first + 32 * p) : 0.f;
                }
#pragma unroll
            for (int p = 0; p < AT_ONCE; ++p)
#pragma unroll
                for (int i = 0; i < ROWS; ++i) sums[i] += part[p][i];
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float sum = warp_sum(sums[i]);
            const int m = begin + i * Warps;
            if (lane == 0 && m < rows) factors[m] = given.unit / sqrtf(sum * given.inverse_width + given.eps);
        }
    }
}

// The row work where sums are read four columns at a time: reduce/dsmem_pull.cuh.
template <bool IS_NORMED, bool IS_ADDED, int TileM, int TileN, int Threads>
struct RowEpilogue {
    static constexpr bool NORMED = IS_NORMED, ADDS = IS_ADDED, WHOLE_WARPS = ADDS;
    struct Addend {};
    static_assert(!ADDS || TileN % 64 == 0, "squares are summed over 64 columns, which 16 lanes have");
    const RowOperands& given;
    float* factors;  // of the tile's rows, shared
    int N;
    uint2 residual;
    float4 weight;

    // Called after the wait for the previous kernel and before the product: requests what the epilogue needs, and writes the
    // rows' factors to shared memory. `rank` is the block's in its cluster.
    __device__ __forceinline__ void begin(int m0, int n0, u32 rank, int rows) {
        if constexpr (ADDS) request(m0, n0, rank, rows);
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
    // Requests the first addend only.
    __device__ __forceinline__ Addend request(int m0, int n0, u32 rank, int rows) {
        const int four = rank * Threads + threadIdx.x, m = four / (TileN / 4), n = n0 + four % (TileN / 4) * 4;
        if (m < rows && n < N) load(m0 + m, n);
        return {};
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

// The row work where a warp receives sums of eight rows and 16 columns: reduce/dsmem_push.cuh. Element i of a lane is of
// row 2 (lane % 4) + i % 2 and column lane / 4 + 8 (i / 2).
template <bool IS_NORMED, bool IS_ADDED>
struct PushedRows {
    static constexpr bool NORMED = IS_NORMED, ADDS = IS_ADDED;
    // What a lane's elements are added to and multiplied by: pairs of rows of both columns, and the columns' weights.
    struct Addend {
        u32 residual[2];
        float weight[2];
    };
    const RowOperands& given;
    const float* factors;  // of the tile's rows, in shared memory
    int N;

    // Requests the addends of rows m .. m + 7, of which those before `rows` exist, and columns n .. n + 15.
    __device__ __forceinline__ Addend request(int m, int n, int rows, int lane) const {
        Addend addend;
        const int mine = m + 2 * (lane % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = n + 8 * h + lane / 4;
            const u16* from = given.residual + mine * given.residual_stride + column;
            const u32 low = mine < rows ? load_scalar(from) : 0;
            const u32 high = mine + 1 < rows ? load_scalar(from + given.residual_stride) : 0;
            addend.residual[h] = low | high << 16;
            addend.weight[h] = reinterpret_cast<const float*>(given.weight)[column];
        }
        FAULT_SITE(residual_of_row, return addend;)
    }
    // Four sums of the tile's row block c.
    __device__ __forceinline__ void scale(float (&sum)[4], int c, int lane) const {
        if constexpr (NORMED) {
            const float low = factors[8 * c + 2 * (lane % 4)], high = factors[8 * c + 2 * (lane % 4) + 1];
            sum[0] *= low, sum[1] *= high, sum[2] *= low, sum[3] *= high;
        }
    }
    // Replaces the results `low` and `high` of one of the lane's columns, in two rows, by the next product's activations. Returns
    // the residual stream's new values, packed, and adds up their squares.
    template <typename E>
    __device__ __forceinline__ u32 add(float& low, float& high, const Addend& addend, int h, float (&squares)[2]) const {
        const u32 kept = E::narrow(fmaf(given.factor, low, widen_half<E, 0>(addend.residual[h])),
                                   fmaf(given.factor, high, widen_half<E, 1>(addend.residual[h])));
        const float a = widen_half<E, 0>(kept), b = widen_half<E, 1>(kept);
        squares[0] += a * a, squares[1] += b * b;
        low = a * addend.weight[h], high = b * addend.weight[h];
        return kept;
    }
    // The squares of rows m .. m + 7 over the warp's 16 columns, from n on.
    __device__ __forceinline__ void store_squares(float (&squares)[2], int m, int n, int rows, int lane) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int distance = 16; FAULT_SITE(squares_of_columns, distance > 3); distance /= 2) squares[j] += of_lane(squares[j], lane ^ distance);
            const int row = m + 2 * lane + j;
            if (lane < 4 && row < rows) given.squares_out[(i64)row * (N / 16) + n / 16] = squares[j];
        }
    }
};
