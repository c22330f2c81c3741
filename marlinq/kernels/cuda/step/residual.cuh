// The residual stream between two products: what the one before adds to it, and its normalisation for the one behind.
//
//   x = residual[m]                                    or, with GATHER,  embedding_scale * embedding[tokens[m]] + positions[p]
//   x = scale * (x + factor * post(first[m] + second[m]))                as many of them as ADDENDS says
//   stored[m] = x                                                        unless it is null
//   out[m] = norm(x)                                                     unless NORM is NONE
//   kept[counter[m]] = norm(x)                                           with KEEPS
//   further[i].out[m] = norm i(x)                                        FURTHER more norms of the same kind
//
// With EXPERTS, first[m] is the sum over that many experts, sum_s routing[m, s] * first[places[m, s]], slots in order, in float32, then
// rounded; a place of -1 adds nothing.
//
// With GATED, second[m] is multiplied by gates[m]. With OWN, a kind of norm, first[m] and second[m] are each normalised before they are
// added.
//
// p is the row's position: lengths[m / T] + m % T + positions_offset. post is a normalisation too. One block a row, whose
// elements stay in registers. With a counter, the last thing that is done is counter[b] += 1 for the first `counted` rows; with KEEPS
// these are the rows of x, and each block counts its own.
//
// Configuration: Element, THREADS, VECTORS (of eight elements, a thread), GATHER, POSITIONS, ADDENDS, EXPERTS, GATED, OWN, POST, NORM,
// FURTHER, KEEPS.
#pragma once
#include "fault_site.cuh"
#include "ptx/launch.cuh"
#include "step/rows.cuh"

// Normalises the block's row of `width` elements in place.
template <typename E, Norm KIND, int VECTORS, int THREADS>
__device__ __forceinline__ void normalize(float (&x)[VECTORS][8], const uint4* weight, const uint4* bias, int width, float eps,
                                          float offset, float (&sums)[THREADS / 32], float (&means)[THREADS / 32]) {
    const int vectors = width / 8;
    if constexpr (KIND == Norm::LAYER) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += x[i][j];
        const float mean = block_sum(sum, means) / width;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (threadIdx.x + i * THREADS < vectors)
#pragma unroll
                for (int j = 0; j < 8; ++j) x[i][j] -= mean;
    }
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += x[i][j] * x[i][j];
    const float factor = 1.f / sqrtf(block_sum(squares, sums) / width + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * THREADS;
        float w[8], b[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] = 1.f, b[j] = 0.f;
        if (v < vectors) {
            if (weight) widen_vector<E>(w, weight[v]);
            if (bias) widen_vector<E>(b, bias[v]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float y = x[i][j] * factor;
            x[i][j] = (KIND == Norm::RMS ? rounded<E>(y) : y) * (w[j] + offset) + b[j];
        }
    }
}

// Mirrored in kernels/step/residual.py: a norm's parameters, and where its results go, rows `stride` elements apart.
struct RowNormGiven {
    const uint4 *weight, *bias;
    uint4* out;
    i64 stride;
    float eps, offset;
};
constexpr int MOST_FURTHER_NORMS = 2;
struct RowNormsGiven {
    RowNormGiven own[2], further[MOST_FURTHER_NORMS];
};

// Eight columns of the sum over a row's experts, times the routing weights. AT_ONCE rows are requested before the first is needed.
// Places below 0 have a routing weight of 0.
template <typename E, int EXPERTS, int AT_ONCE>
__device__ __forceinline__ uint4 sum_of_experts(const uint4* rows, const int* places, const float* routing, i64 stride, int v) {
    constexpr int TOGETHER = EXPERTS < AT_ONCE ? EXPERTS : AT_ONCE;
    float sum[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = 0.f;
#pragma unroll 1
    for (int base = 0; base < EXPERTS; base += TOGETHER) {
        uint4 some[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int s = base + i;
            some[i] = make_uint4(0, 0, 0, 0);
            if (s < EXPERTS && FAULT_SITE(routed_row_elsewhere, places[s] >= 0)) some[i] = load_l2(rows + places[s] * (stride / 8) + v);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int s = base + i;
            if (s >= EXPERTS) break;
            float row[8];
            widen_vector<E>(row, some[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] = fmaf(FAULT_SITE(routing_of_slot, routing[s]), row[j], sum[j]);
        }
    }
    return narrow_vector<E>(sum);
}

template <typename C>
__device__ __forceinline__ void advance_residual(const i64* tokens, const uint4* embedding, const uint4* positions,
                                                 const int* lengths, const uint4* residual, const uint4* first,
                                                 const uint4* second, const float* gates, const int* places,
                                                 const float* routing, const uint4* post_weight, const uint4* post_bias,
                                                 const uint4* weight, const uint4* bias, uint4* stored, uint4* out,
                                                 uint4* kept, int* counter, int counted, int width, int T, int positions_offset,
                                                 i64 residual_stride, i64 first_stride, i64 second_stride, i64 out_stride, float embedding_scale,
                                                 float factor, float scale, float post_eps, float post_offset, float eps,
                                                 float offset, const RowNormsGiven& others) {
    typedef typename C::Element E;
    constexpr int THREADS = C::THREADS, VECTORS = C::VECTORS;
    __shared__ float sums[8 + 2 * C::FURTHER][THREADS / 32];
    launch_dependents();
    wait_for_previous_kernel();
    const i64 m = blockIdx.x;
    const int vectors = width / 8;
    float x[VECTORS][8];
    i64 token = 0, position = 0;
    if (C::GATHER) token = load_scalar(tokens + m);
    // All threads read it here, before the sums over the block; one of them writes it after these.
    const i64 kept_place = C::KEEPS ? load_scalar(counter + m) : 0;
    static_assert(!C::KEEPS || C::NORM != Norm::NONE, "normalised rows are kept");
    if (C::POSITIONS) position = load_scalar(lengths + m / T) + m % T + positions_offset;
    // Rows of the residual stream may be padded to a multiple of 8 elements.
    uint4 a[VECTORS], d[VECTORS], e[VECTORS];
    __shared__ int from[C::EXPERTS > 0 ? C::EXPERTS : 1];
    __shared__ float counts[C::EXPERTS > 0 ? C::EXPERTS : 1];
    if constexpr (C::EXPERTS > 0) {
        static_assert(C::EXPERTS <= THREADS, "a thread a slot");
        if (threadIdx.x < C::EXPERTS) {
            const int place = load_scalar(places + FAULT_SITE(places_of_row, m * C::EXPERTS + threadIdx.x));
            from[threadIdx.x] = place;
            counts[threadIdx.x] = place < 0 ? 0.f : load_scalar(routing + m * C::EXPERTS + threadIdx.x);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int v = threadIdx.x + i * THREADS;
        a[i] = d[i] = e[i] = make_uint4(0, 0, 0, 0);
        if (v >= vectors) continue;
        a[i] = C::GATHER ? embedding[token * vectors + v] : load_l2(residual + m * (residual_stride / 8) + v);
        if (C::POSITIONS) d[i] = positions[position * vectors + v];
        if constexpr (C::EXPERTS > 0) d[i] = sum_of_experts<E, C::EXPERTS, VECTORS <= 2 ? 8 : 4>(first, from, counts, first_stride, v);
        else if (C::ADDENDS > 0) d[i] = load_l2(first + m * (first_stride / 8) + v);
        if (C::ADDENDS > 1) e[i] = load_l2(second + m * (second_stride / 8) + v);
    }
    static_assert(!C::GATED || C::ADDENDS > 1, "a gate is the second addend's");
    const float gate = C::GATED ? load_scalar(FAULT_SITE(gate_of_row, gates + m)) : 1.f;
    static_assert(!C::POSITIONS || (C::GATHER && C::ADDENDS == 0), "positions are added to embeddings");
    float y[VECTORS][8];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        widen_vector<E>(x[i], a[i]);
        widen_vector<E>(y[i], d[i]);
    }
    // The sum of both is rounded before it is normalised, as it is where they are added by a module of their own.
    constexpr bool SUMMED = C::ADDENDS > 1 && C::POST != Norm::NONE;
    if constexpr (C::OWN != Norm::NONE) {
        static_assert(C::ADDENDS > 1, "norms of two addends");
        const RowNormGiven &one = others.own[0], &two = others.own[1];
        float z[VECTORS][8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) widen_vector<E>(z[i], e[i]);
        normalize<E, C::OWN, VECTORS, THREADS>(y, one.weight, one.bias, width, one.eps, one.offset, sums[4], sums[5]);
        normalize<E, C::OWN, VECTORS, THREADS>(z, two.weight, two.bias, width, two.eps, two.offset, sums[6], sums[7]);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            widen_vector<E>(y[i], narrow_vector<E>(y[i]));
            e[i] = narrow_vector<E>(z[i]);
        }
    }
    if constexpr (SUMMED) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            float z[8];
            widen_vector<E>(z, e[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                y[i][j] = threadIdx.x + i * THREADS < vectors ? rounded<E>(y[i][j] + gate * z[j]) : 0.f;
        }
    }
    if constexpr (C::POST != Norm::NONE) {
        normalize<E, C::POST, VECTORS, THREADS>(y, post_weight, post_bias, width, post_eps, post_offset, sums[0], sums[1]);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float z[8];
        widen_vector<E>(z, e[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (C::GATHER) x[i][j] = rounded<E>(x[i][j] * embedding_scale);
            if (C::POSITIONS) x[i][j] += y[i][j];
            if (C::ADDENDS > 0) x[i][j] += factor * y[i][j];
            if (C::ADDENDS > 1 && !SUMMED) x[i][j] += FAULT_SITE(second_addend, factor * gate) * z[j];
            if (C::ADDENDS > 0) x[i][j] *= scale;
        }
        const int v = threadIdx.x + i * THREADS;
        const uint4 sum = narrow_vector<E>(x[i]);
        if (v < vectors && stored) stored[m * (residual_stride / 8) + v] = sum;
        widen_vector<E>(x[i], sum);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (v >= vectors) x[i][j] = 0.f;
    }
    static_assert(C::FURTHER <= MOST_FURTHER_NORMS, "parameters of so many norms");
#pragma unroll
    for (int n = 0; n < C::FURTHER; ++n) {
        const RowNormGiven& norm = others.further[n];
        float z[VECTORS][8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) z[i][j] = x[i][j];
        normalize<E, C::NORM, VECTORS, THREADS>(z, norm.weight, norm.bias, width, norm.eps, norm.offset, sums[8 + 2 * n], sums[9 + 2 * n]);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (v < vectors) norm.out[m * (norm.stride / 8) + v] = narrow_vector<E>(z[i]);
        }
    }
    if constexpr (C::NORM != Norm::NONE) {
        normalize<E, C::NORM, VECTORS, THREADS>(x, weight, bias, width, eps, offset, sums[2], sums[3]);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (v >= vectors) continue;
            const uint4 normed = narrow_vector<E>(x[i]);
            out[m * (out_stride / 8) + v] = normed;
            if (C::KEEPS) kept[kept_place * vectors + v] = normed;
        }
    }
    if (C::KEEPS) {
        if (threadIdx.x == 0) counter[m] = kept_place + 1;
    } else if (counter && m == 0)
        for (int row = threadIdx.x; row < counted; row += THREADS) counter[row] = load_scalar(counter + row) + 1;
}

// Blocks with much in registers may use all of a multiprocessor's: ptxas would spill some so that one more block fits.
#define INSTANTIATE_STEP_RESIDUAL(NAME, CONFIGURATION)                                                                   \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS, CONFIGURATION::EXPERTS > 0 || CONFIGURATION::OWN != Norm::NONE ? 1 : 0) \
    NAME(const i64* tokens, const uint4* embedding, const uint4* positions, const int* lengths, const uint4* residual,   \
         const uint4* first, const uint4* second, const float* gates, const int* places, const float* routing, const uint4* post_weight, \
         const uint4* post_bias, const uint4* weight,                                                                    \
         const uint4* bias, uint4* stored, uint4* out, uint4* kept, int* counter, int counted, int width, int T, int positions_offset, \
         i64 residual_stride, i64 first_stride, i64 second_stride, i64 out_stride, float embedding_scale, float factor,  \
         float scale, float post_eps, float post_offset, float eps, float offset, RowNormsGiven others) { \
        advance_residual<CONFIGURATION>(tokens, embedding, positions, lengths, residual, first, second, gates, places, routing, post_weight, \
                                        post_bias, weight, bias, stored, out, kept, counter, counted, width, T,                \
                                        positions_offset, residual_stride, first_stride, second_stride, out_stride, embedding_scale,   \
                                        factor, scale, post_eps, post_offset, eps, offset, others);                             \
    }
