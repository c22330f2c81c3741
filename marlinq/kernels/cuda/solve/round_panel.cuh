// GPTQ's inner step: rounds a panel of at most 128 input channels, in order; later channels compensate for each error.
//
//   u     [rows, N]  weights with the updates of all channels before the panel
//   v     = u / s + z, in code units; row k is rounded, code[k] = clamp(round(v[k]), 0, top), d[k] = v[k] - code[k],
//           and every later row gets v[j] -= feedback[j, k] * d[k]
//   terms = d * diagonal * s, the loss terms R^T (w - q)
//
// SEARCH: the panel is a whole quant group. Its scales are chosen first, among factors times the range, for the least
// sum of importance * (u - q)^2 (marlinq/methods/grid.py, search_grid), and fitted to the codes by least squares afterwards
// (methods/solution.py, refit): R^T (q / s) = (base - terms) / s. Otherwise scales and zeros are given and stay.
//
// Output channels don't influence each other. A block has 32 of them, one a lane; its four warps share the rows:
//
//   search   warp w tries factors w, w + 4, ... on all rows, with both signs where the grid is symmetric
//   round    16 rows at a time: warp 0 rounds them one after the other, then all warps update the rows below,
//            row j by warp j % 4. Rows of `feedback` are those that are updated, so a thread reads them in vectors.
//
// All sums have a fixed order: the same input gives the same bits, however many blocks run at once.
//
// Configuration: Scale (the dtype of the scales), SEARCH, SYMMETRIC, FACTORS.
#pragma once
#include "fault_site.cuh"
#include "solve/storable.cuh"

namespace panel {

constexpr int COLUMNS = 32, WARPS = 4, LEAF = 16;
constexpr float TIE = 1e-4f;  // grid.py's

struct Grid {
    float scale, zero;
};

// `range` is the full scale of a symmetric grid; an asymmetric one spans low to high.
template <typename C>
__device__ __forceinline__ Grid grid(float factor, float range, float low, float high, float top, float middle) {
    typedef typename C::Scale E;
    if (C::SYMMETRIC) return {storable<E>(range * factor), middle};
    low *= factor, high *= factor;
    float scale = storable<E>((high - low) / top);
    const float zero = rintf(-low / scale);
    if (zero < 1.f) scale = storable<E>(high / (top - 1.f));
    return {scale, fminf(fmaxf(zero, 1.f), top)};
}

__device__ __forceinline__ float nearest(float v, float top) { return fminf(fmaxf(rintf(v), 0.f), top); }

// The sum of four warps' values for each lane, the same in all warps. Call it only when all have read an earlier sum's `space`.
__device__ __forceinline__ float across(float value, float (*space)[COLUMNS]) {
    const int lane = threadIdx.x % 32;
    space[threadIdx.x / 32][lane] = value;
    __syncthreads();
    const float sum = (space[0][lane] + space[1][lane]) + (space[2][lane] + space[3][lane]);
    __syncthreads();
    return sum;
}

struct Shared {
    float *v, *feedback, *diagonal;
    float (*exchange)[COLUMNS];
    int (*chosen)[COLUMNS];
    u32 (*codes)[COLUMNS];  // of four rows in a word
};

__device__ __forceinline__ float code_at(const Shared& at, int k) {
    return static_cast<float>(static_cast<int>(at.codes[k / 4][threadIdx.x % 32] >> 8 * (k % 4) & 0xffu));
}

// Least cost among the candidates; the earliest of equals, and the full range where every cost overflows. Candidate 2 f is
// factor f, 2 f + 1 the same with the other sign.
template <typename C>
__device__ __forceinline__ Grid search(const Shared& at, const float* factors, int rows, float top, float middle) {
    constexpr int EACH = (C::FACTORS + WARPS - 1) / WARPS, SIGNS = C::SYMMETRIC ? 2 : 1, NONE = 2 * C::FACTORS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float low = 0.f, high = 0.f;
    for (int k = warp; k < rows; k += WARPS) {
        const float u = at.v[k * COLUMNS + lane];
        low = fminf(low, u), high = fmaxf(high, u);
    }
    at.exchange[warp][lane] = low;
    at.exchange[WARPS + warp][lane] = high;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        low = fminf(low, at.exchange[other][lane]);
        high = fmaxf(high, at.exchange[WARPS + other][lane]);
    }
    __syncthreads();
    // The sign that is tried first puts the code without a counterpart on the longer side.
    const float range = fmaxf(high, -low) * (2.f / top) * (high > -low ? -1.f : 1.f);
    float inverse[EACH][SIGNS], zero[EACH], cost[EACH][SIGNS];
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
        // Some warps try their last factor twice.
        const float factor = factors[min(c * WARPS + warp, C::FACTORS - 1)];
#pragma unroll
        for (int sign = 0; sign < SIGNS; ++sign) {
            const Grid tried = grid<C>(sign ? -factor : factor, range, low, high, top, middle);
            inverse[c][sign] = 1.f / tried.scale, zero[c] = tried.zero, cost[c][sign] = 0.f;
        }
    }
    for (int k = 0; k < rows; ++k) {
        const float u = at.v[k * COLUMNS + lane], root = at.diagonal[k], importance = root * root;
#pragma unroll
        for (int c = 0; c < EACH; ++c)
#pragma unroll
            for (int sign = 0; sign < SIGNS; ++sign) {
                const float v = u * inverse[c][sign] + zero[c], error = v - nearest(v, top);
                cost[c][sign] += importance * (error * error);
            }
    }
    float best = __uint_as_float(0x7f800000u);
    int chosen = NONE;
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
        const int place = min(c * WARPS + warp, C::FACTORS - 1);
        const float scale = grid<C>(factors[place], range, low, high, top, middle).scale;
        float found = cost[c][0] * (scale * scale);
        int candidate = 2 * place;
        if (SIGNS == 2) {
            // Where no weight is clipped both signs cost the same, and float rounding must not decide between them.
            const float other = cost[c][SIGNS - 1] * (scale * scale);
            if (other < found * (1.f - TIE)) found = other, ++candidate;
        }
        if (found < best) best = found, chosen = candidate;
    }
    at.exchange[warp][lane] = best;
    at.chosen[warp][lane] = chosen;
    FAULT_SITE(candidates_told, __syncthreads();)
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        const float found = at.exchange[other][lane];
        const int candidate = at.chosen[other][lane];
        if (found < best || (found == best && candidate < chosen)) best = found, chosen = candidate;
    }
    __syncthreads();
    // The full range is symmetric with a positive scale.
    if (chosen == NONE) return grid<C>(1.f, fabsf(range), low, high, top, middle);
    const float factor = factors[chosen / 2];
    return grid<C>(chosen % 2 ? -factor : factor, range, low, high, top, middle);
}

// Rounds the rows in order: their errors replace their values in at.v, their codes go to at.codes.
__device__ __forceinline__ void round_rows(const Shared& at, int padded, float top) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int first = 0; first < padded; first += LEAF) {
        float errors[LEAF];
        u32 four = 0;
        if (warp == 0) {
#pragma unroll
            for (int j = 0; j < LEAF; ++j) {
                float v = at.v[(first + j) * COLUMNS + lane];
                const float* row = at.feedback + (first + j) * padded + first;
#pragma unroll
                for (int k = 0; k < LEAF; ++k)
                    if (k < j) v -= row[k] * errors[k];
                const float code = nearest(v, top);
                errors[j] = v - code;
                four |= static_cast<u32>(static_cast<int>(code)) << 8 * (j % 4);
                if (j % 4 == 3) at.codes[(first + j) / 4][lane] = four, four = 0;
                at.v[(first + j) * COLUMNS + lane] = errors[j];
            }
        }
        FAULT_SITE(errors_there, __syncthreads();)
        if (first + LEAF >= padded) break;
#pragma unroll
        for (int k = 0; k < LEAF; ++k) errors[k] = at.v[(first + k) * COLUMNS + lane];
#pragma unroll 2
        for (int j = first + LEAF + warp; j < padded; j += WARPS) {
            float v = at.v[j * COLUMNS + lane];
            const float4* row = reinterpret_cast<const float4*>(at.feedback + j * padded + first);
#pragma unroll
            for (int k = 0; k < LEAF / 4; ++k) {
                const float4 four = row[k];
                v -= four.x * errors[4 * k];
                v -= four.y * errors[4 * k + 1];
                v -= four.z * errors[4 * k + 2];
                v -= four.w * errors[4 * k + 3];
            }
            at.v[j * COLUMNS + lane] = v;
        }
        FAULT_SITE(rows_updated, __syncthreads();)
    }
}

template <typename C>
__device__ __forceinline__ void round_panel(int block, const float* u, const float* base, const float* w, const float* feedback,
                                            const float* diagonal, const float* factors, float* scales, float* zeros,
                                            unsigned char* codes, float* terms, float* difference, double* loss, int rows,
                                            int N, float top, float middle, float shift) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, padded = (rows + LEAF - 1) / LEAF * LEAF;
    Shared at;
    at.feedback = reinterpret_cast<float*>(memory);
    at.v = at.feedback + padded * padded;
    at.diagonal = at.v + padded * COLUMNS;
    at.exchange = reinterpret_cast<float (*)[COLUMNS]>(at.diagonal + padded);
    at.chosen = reinterpret_cast<int (*)[COLUMNS]>(at.exchange + 2 * WARPS);
    at.codes = reinterpret_cast<u32 (*)[COLUMNS]>(at.chosen + WARPS);
    const int n = block * COLUMNS + lane;
    const bool inside = n < N;
    Grid used = {1.f, 0.f};
    if (!C::SEARCH && inside) used = {scales[n], zeros[n]};
    float inverse = 1.f / used.scale;

    for (int i = threadIdx.x; i < padded * padded; i += WARPS * 32) {
        const int row = i / padded, column = i % padded;
        at.feedback[i] = row < rows && column < row ? feedback[row * rows + column] : 0.f;
    }
    for (int k = warp; k < padded; k += WARPS)
        at.v[k * COLUMNS + lane] = k < rows && inside ? u[static_cast<i64>(k) * N + n] : 0.f;
    for (int k = threadIdx.x; k < padded; k += WARPS * 32) at.diagonal[k] = k < rows ? diagonal[k] : 0.f;
    __syncthreads();

    if (C::SEARCH) {
        used = search<C>(at, factors, rows, top, middle);
        inverse = 1.f / used.scale;
    }
    for (int k = warp; k < padded; k += WARPS) at.v[k * COLUMNS + lane] = at.v[k * COLUMNS + lane] * inverse + used.zero;
    __syncthreads();
    round_rows(at, padded, top);

    float scale = used.scale;
    if (C::SEARCH) {
        // If the values of all codes are zero, base and terms differ only by rounding, and the scale must not be fitted to that.
        float overlap = 0.f, power = 0.f, levels = 0.f;
        for (int k = warp; k < rows; k += WARPS) {
            const float term = at.v[k * COLUMNS + lane] * at.diagonal[k] * used.scale;
            const float reached = ((inside ? base[static_cast<i64>(k) * N + n] : 0.f) - term) * inverse;
            overlap += reached * term, power += reached * reached;
            levels += fabsf(code_at(at, k) - used.zero);
        }
        overlap = across(overlap, at.exchange);
        power = across(power, at.exchange);
        levels = across(levels, at.exchange);
        const float best = used.scale + overlap / power;
        if (levels > 0.f && power > 0.f && best != 0.f) scale = storable<typename C::Scale>(best);
    }
    float squares = 0.f, norms = 0.f;
    for (int k = warp; k < rows; k += WARPS) {
        const i64 place = static_cast<i64>(k) * N + n;
        const float code = code_at(at, k);
        float term = at.v[k * COLUMNS + lane] * at.diagonal[k] * used.scale;
        if (C::SEARCH) {
            const float reached = ((inside ? base[place] : 0.f) - term) * inverse;
            term -= reached * (scale - used.scale);
        }
        squares += term * term;
        if (inside) {
            const float error = w[place] - (code - used.zero) * scale;
            norms += error * error;
            codes[place] = static_cast<unsigned char>(static_cast<int>(code));
            difference[place] = error;
            if (terms) terms[place] = term;
        }
    }
    squares = across(squares, at.exchange);
    norms = across(norms, at.exchange);
    if (warp == 0 && inside) {
        if (C::SEARCH) scales[n] = scale, zeros[n] = used.zero;
        if (loss) loss[n] += static_cast<double>(squares - norms * shift);
    }
}

}  // namespace panel

#define INSTANTIATE_ROUND_PANEL(NAME, CONFIGURATION)                                                                     \
    extern "C" __global__ void __launch_bounds__(128)                                                                    \
    NAME(const float* u, const float* base, const float* w, const float* feedback, const float* diagonal,                \
         const float* factors, float* scales, float* zeros, unsigned char* codes, float* terms, float* difference,       \
         double* loss, int rows, int N, float top, float middle, float shift) {                                          \
        panel::round_panel<CONFIGURATION>(blockIdx.x, u, base, w, feedback, diagonal, factors, scales, zeros, codes, terms,          \
                                          difference, loss, rows, N, top, middle, shift);                                \
    }
