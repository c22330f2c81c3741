// The router: chooses the experts of each row, and their weights:
//
//   logits[e] = sum_k x[m, k] * weight[e, k]      in float32, with logit_bias[e] if BIASED, then, unless WIDE, rounded to Element,
//               as a product of the model's is
//   ids[m, s] = the TOP experts of the highest logits, in falling order; of equal logits the lowest number first.
//               If CORRECTED, of the highest score(logits[e]) + correction[e], or with LOGITS_CORRECTED of the highest
//               logits[e] + correction[e]. With GROUPS of neighbouring experts, only those
//               of the KEPT best groups are chosen from. A group's value is its highest logit; if CORRECTED, the sum of its two
//               highest corrected scores. If ZEROED, experts of other groups may still be chosen, with a corrected score of 0
//   weights[m, s] = scale * score(logits[ids[m, s]])     over the sum of the scores taken, if NORMALISED;
//               times factors[expert] if FACTORED
//   gates[m] = sigmoid(sum_k x[m, k] * gate[k])          if GATED: the weight of a shared expert; rounded as logits are
//
// With SHARED > 0 the shared expert is stored as SHARED further experts, numbered from E on. Every row takes them besides its TOP,
// each with the weight gates[m], or 1 without a gate. Rows of ids and weights then have TOP + SHARED numbers; gates is not written.
//
// Unless NORM is NONE, the kernel first computes x by an addition and a norm (step/residual.cuh with one addend):
//
//   stored[m] = residual[m] + factor * first[m]
//   x[m] = norm(stored[m])
//
// Every block of the row computes x[m] for itself, in shared memory; the first block also writes stored[m] and x[m].
//
// score is a softmax over all experts or a sigmoid of each. A cluster computes a row. The warps of all its blocks take experts in
// turns; each block keeps its logits in its own shared memory. The first block collects them, and one of its warps, with PER logits a
// lane, takes the largest one TOP times. Each warp keeps the loads of two steps' weights in flight; the first two are requested before
// the previous kernel ends.
//
// Configuration: Element, CLUSTER, WARPS, PER (experts / 32, rounded up), TOP, SOFTMAX, NORMALISED, BIASED, CORRECTED,
// LOGITS_CORRECTED, GROUPS, KEPT, ZEROED, FACTORED, WIDE, GATED, SHARED, NORM, VECTORS (of a row, a thread).
#pragma once
#include "fault_site.cuh"
#include "ptx/bits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "step/residual.cuh"

// Operands of the addition and norm before the router. Rows are `*_stride` elements apart.
struct RouterAddition {
    const uint4 *residual, *first, *weight, *bias;
    uint4* stored;
    i64 residual_stride, first_stride;
    float factor, eps, offset;
};

template <typename C>
struct RouterRow {
    typedef typename C::Element E;
    static constexpr int CLUSTER = C::CLUSTER, WARPS = C::WARPS, PER = C::PER;
    // Vectors of a row that a lane requests at once: 4 KB a warp.
    static constexpr int UNROLL = 8;
    static constexpr float LOWEST = -3.402823466e38f;
    // Logits in shared memory, in whole vectors of 16 bytes, as other blocks' are read. The gate's follows those of the experts.
    static constexpr int SLOTS = (32 * PER + C::GATED + 3) / 4 * 4;

    static constexpr bool ADDS = C::NORM != Norm::NONE;
    static constexpr int TAKEN = C::TOP + C::SHARED;

    uint4* x;
    const uint4 *weight, *gate;
    const float* logit_bias;
    int experts, vectors, lane, warp, rank;

    __device__ __forceinline__ float gate_of(const float* logits) const { return 1.f / (1.f + expf(-logits[experts])); }
    __device__ __forceinline__ int products() const { return experts + C::GATED; }

    __device__ __forceinline__ void request(uint4 (&w)[UNROLL], int expert, int begin) const {
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int v = begin + i * 32 + lane;
            w[i] = make_uint4(0, 0, 0, 0);
            const uint4* from = FAULT_SITE(gate_weights, C::GATED && expert == experts ? gate : weight + (i64)expert * vectors);
            if (expert < products() && v < vectors) w[i] = load_cached(from + v);
        }
    }

    // Vector v of the row: from shared memory where the kernel made the row (ADDS), else from global memory.
    __device__ __forceinline__ uint4 element(const uint4* row, int v) const { return ADDS ? row[v] : load_l2(x + v); }

    // Writes norm(residual + factor * first) to `row`.
    __device__ __forceinline__ void make(const RouterAddition& given, i64 m, uint4* row) const {
        constexpr int THREADS = 32 * WARPS;
        __shared__ float sums[2][WARPS];
        float values[C::VECTORS][8];
#pragma unroll
        for (int i = 0; i < C::VECTORS; ++i) {
            const int v = threadIdx.x + i * THREADS;
            uint4 a = make_uint4(0, 0, 0, 0), d = a;
            if (v < vectors) {
                a = load_l2(given.residual + m * (given.residual_stride / 8) + v);
                d = load_l2(given.first + m * (given.first_stride / 8) + v);
            }
            float addend[8];
            widen_vector<E>(values[i], a);
            widen_vector<E>(addend, d);
#pragma unroll
            for (int j = 0; j < 8; ++j) values[i][j] += FAULT_SITE(addend_factor, given.factor * addend[j]);
            const uint4 sum = narrow_vector<E>(values[i]);
            if (v < vectors && rank == 0) given.stored[m * (given.residual_stride / 8) + v] = sum;
            widen_vector<E>(values[i], sum);
        }
        normalize<E, C::NORM, C::VECTORS, THREADS>(values, given.weight, given.bias, vectors * 8, given.eps, given.offset, sums[0],
                                                   sums[1]);
#pragma unroll
        for (int i = 0; i < C::VECTORS; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (v >= vectors) continue;
            row[v] = narrow_vector<E>(values[i]);
            FAULT_SITE(made_row_stored, if (rank == 0) x[v] = row[v];)
        }
        FAULT_SITE(made_row_there, __syncthreads();)
    }

    __device__ __forceinline__ float add(const uint4* row, const uint4 (&w)[UNROLL], int begin, float sum) const {
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int v = begin + i * 32 + lane;
            if (v >= vectors) continue;
            float a[8], b[8];
            widen_vector<E>(a, element(row, v));
            widen_vector<E>(b, w[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += a[j] * b[j];
        }
        return sum;
    }

    // Expert e, and behind the last the gate, is multiplied by warp e % (CLUSTER * WARPS) of the cluster, counted through its blocks.
    // A step of a warp is 32 * UNROLL vectors of one expert's row. The loads of two steps are in flight at a time.
    __device__ __forceinline__ void multiply(const RouterAddition& given, i64 m, uint4* row, float* logits) const {
        const int first = rank * WARPS + warp, each = (vectors + 32 * UNROLL - 1) / (32 * UNROLL);
        const auto expert_of = [&](int step) { return first + step / each * (CLUSTER * WARPS); };
        const auto request_step = [&](uint4(&w)[UNROLL], int step) { request(w, expert_of(step), step % each * (32 * UNROLL)); };
        uint4 w[2][UNROLL];
        request_step(w[0], 0);
        request_step(w[1], 1);
        FAULT_SITE(router_waits, wait_for_previous_kernel();)
        if constexpr (ADDS) make(given, m, row);
        float sum = 0.f;
        const auto take = [&](const uint4(&w)[UNROLL], int step) {
            const int expert = expert_of(step);
            if (expert >= FAULT_SITE(products_multiplied, products())) return;
            if (step % each == 0) sum = 0.f;
            sum = add(row, w, step % each * (32 * UNROLL), sum);
            if (step % each < each - 1) return;
            float logit = warp_sum(sum);
            if (C::BIASED && expert < experts) logit += logit_bias[expert];
            if (lane == 0) logits[expert] = FAULT_SITE(logit_width, C::WIDE ? logit : rounded<E>(logit));
        };
        for (int step = 0; expert_of(step) < products(); step += 2) {
            take(w[0], step);
            request_step(w[0], step + 2);
            take(w[1], step + 1);
            request_step(w[1], step + 3);
        }
    }

    // The score of a logit; `all` is the sum of exp(logit - highest).
    __device__ __forceinline__ static float score(float logit, float highest, float all) {
        return C::SOFTMAX ? expf(logit - highest) / all : 1.f / (1.f + expf(-logit));
    }

    __device__ __forceinline__ float sum_of_exponentials(const float (&mine)[PER], float highest) const {
        float all = 0.f;
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (lane + 32 * i < experts) all += expf(mine[i] - highest);
        return warp_sum(all);
    }

    // Bit g is set if group g is one of the KEPT best, the first among equal ones. Lane g computes the value of group g.
    __device__ __forceinline__ u32 kept_groups(const float (&mine)[PER]) const {
        __shared__ float decisive[32 * PER];
#pragma unroll
        for (int i = 0; i < PER; ++i) decisive[lane + 32 * i] = mine[i];
        FAULT_SITE(group_scores_there, __syncwarp();)
        const int size = experts / C::GROUPS;
        float best = LOWEST, second = LOWEST;
        if (lane < C::GROUPS) {
            // Lanes begin at different places: groups of 32 would all be in one bank.
            int at = lane % size;
            for (int j = 0; j < size; ++j) {
                const float value = decisive[FAULT_SITE(group_logits, lane * size + at)];
                second = FAULT_SITE(second_of_group, fmaxf(second, fminf(best, value)));
                best = fmaxf(best, value);
                at = at + 1 < size ? at + 1 : 0;
            }
        }
        const u32 key = lane < C::GROUPS ? ordered(FAULT_SITE(group_score, C::CORRECTED ? best + second : best)) : 0u;
        int before = 0;
#pragma unroll
        for (int g = 0; g < C::GROUPS; ++g) {
            const u32 other = __shfl_sync(0xffffffffu, key, g);
            before += other > key || (other == key && g < lane);
        }
        return warp_add(lane < C::GROUPS && FAULT_SITE(groups_kept, before < C::KEPT) ? 1u << lane : 0u);
    }

    __device__ __forceinline__ void choose(const float* logits, const float* correction, const float* factors, int* ids, float* weights,
                                           float scale) const {
        // The values to compare, logits or corrected scores. + 0.f turns -0 into 0: they are equal, but not in the order of bits.
        float mine[PER];
#pragma unroll
        for (int i = 0; i < PER; ++i) mine[i] = lane + 32 * i < experts ? FAULT_SITE(negative_zero, logits[lane + 32 * i] + 0.f) : LOWEST;
        float kept = 0.f, highest = 0.f, all = 0.f, sum = 0.f;
        u32 taken = 0;
        if constexpr (C::CORRECTED) {
            if (C::SOFTMAX) {
                u32 key = 0;
#pragma unroll
                for (int i = 0; i < PER; ++i) key = max(key, ordered(mine[i]));
                highest = FAULT_SITE(highest_logit, from_ordered(warp_max(key)));
                all = sum_of_exponentials(mine, highest);
            }
#pragma unroll
            for (int i = 0; i < PER; ++i)
                if (lane + 32 * i < experts) {
                    if (!C::LOGITS_CORRECTED) mine[i] = FAULT_SITE(corrected_scores, score(mine[i], highest, all) + correction[lane + 32 * i]) + 0.f;
                    if (C::LOGITS_CORRECTED) mine[i] = mine[i] + correction[lane + 32 * i] + 0.f;
                }
        }
        static_assert(!C::ZEROED || C::CORRECTED, "a score of zero has no logit");
        if constexpr (C::GROUPS > 1) {
            const u32 groups = kept_groups(mine);
            const int size = experts / C::GROUPS;
#pragma unroll
            for (int i = 0; i < PER; ++i) {
                const int expert = lane + 32 * i;
                if (expert >= experts || groups >> FAULT_SITE(group_of_expert, expert / size) & 1) continue;
                FAULT_SITE(dropped_scores, if (C::ZEROED) mine[i] = 0.f; else taken |= 1u << i;)
            }
        }
        int chosen = 0;
        for (int s = 0; s < C::TOP; ++s) {
            // Two reductions of the whole warp find the largest value and, among equal ones, the lowest index: two instructions,
            // where shuffles take ten.
            u32 key = 0;
            int at = experts;
#pragma unroll
            for (int i = 0; i < PER; ++i)
                if (!(taken >> i & 1) && lane + 32 * i < experts && ordered(mine[i]) > key) key = ordered(mine[i]), at = lane + 32 * i;
            const u32 most = warp_max(key);
            at = FAULT_SITE(lowest_number, static_cast<int>(~warp_max(key == most ? ~static_cast<u32>(at) : 0u)));
            const float best = FAULT_SITE(chosen_logit, logits[at]);
            if (at % 32 == lane) taken |= FAULT_SITE(taken_bit, 1u << at / 32);
            if (FAULT_SITE(softmax_by_choice, C::SOFTMAX && !C::CORRECTED && s == 0)) highest = best, all = sum_of_exponentials(mine, highest);
            const float found = score(best, highest, all);
            sum += found;
            if (s == lane) kept = found, chosen = at;
        }
        if (lane < C::TOP) {
            ids[lane] = chosen;
            if (C::FACTORED) scale *= factors[chosen];
            weights[lane] = FAULT_SITE(chosen_weight, (C::NORMALISED ? kept / sum : kept) * scale);
        } else if (lane < TAKEN) {
            ids[lane] = FAULT_SITE(shared_number, experts + lane - C::TOP);
            weights[lane] = C::GATED ? gate_of(logits) : 1.f;
        }
    }
};

template <typename C>
__device__ __forceinline__ void route_rows(const RouterAddition& given, uint4* x, const uint4* weight, const uint4* gate,
                                           const float* logit_bias, const float* correction, const float* factors, int* ids, float* weights, float* gates,
                                           int experts, int width, i64 x_stride, float scale) {
    typedef RouterRow<C> Row;
    static_assert(Row::TAKEN <= 32 && C::PER <= 32, "a lane keeps one choice, and a bit for each of its logits");
    static_assert(C::GROUPS <= 32, "a lane looks at a group");
    __shared__ __align__(16) float logits[Row::SLOTS];
    __shared__ uint4 made[Row::ADDS ? C::VECTORS * 32 * C::WARPS : 1];
    launch_dependents();
    const i64 m = blockIdx.x / C::CLUSTER;
    const Row row{x + m * (x_stride / 8), weight, gate, logit_bias, experts, width / 8, static_cast<int>(threadIdx.x % 32),
                  static_cast<int>(threadIdx.x / 32), static_cast<int>(blockIdx.x % C::CLUSTER)};
    row.multiply(given, m, made, logits);
    if constexpr (C::CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
        // Others' logits: four neighbours belong to one block, since blocks have a multiple of four warps.
        static_assert(C::WARPS % 4 == 0, "vectors of logits of one block");
        if (row.rank == 0) {
            for (int four = threadIdx.x; four < (FAULT_SITE(logits_read, row.products()) + 3) / 4; four += 32 * C::WARPS) {
                const u32 owner = 4 * four / C::WARPS % C::CLUSTER;
                FAULT_SITE(own_logits, if (owner == 0) continue;)
                const float4 v = load_cluster_float4(cluster_address(shared_address(logits + 4 * four), owner));
                logits[4 * four] = v.x, logits[4 * four + 1] = v.y, logits[4 * four + 2] = v.z, logits[4 * four + 3] = v.w;
            }
        }
        // A block stays until its shared memory has been read.
        cluster_arrive_relaxed();
        cluster_wait();
    }
    __syncthreads();
    if (row.rank == 0 && row.warp == 0) row.choose(logits, correction, factors, ids + m * Row::TAKEN, weights + m * Row::TAKEN, scale);
    if (C::GATED && C::SHARED == 0 && row.rank == 0 && threadIdx.x == 32 * C::WARPS - 1) FAULT_SITE(gate_value, gates[m] = row.gate_of(logits);)
}

#define INSTANTIATE_STEP_ROUTER(NAME, CONFIGURATION)                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * CONFIGURATION::WARPS, 1) CLUSTER_OF(CONFIGURATION::CLUSTER)       \
    NAME(const uint4* residual, const uint4* first, const uint4* norm_weight, const uint4* norm_bias, uint4* stored, uint4* x,      \
         const uint4* weight, const uint4* gate, const float* logit_bias, const float* correction, const float* factors, int* ids, \
         float* weights, float* gates, int experts, int width, i64 residual_stride, i64 first_stride, i64 x_stride, float factor, float eps,          \
         float offset, float scale) {                                                                                   \
        const RouterAddition given = {residual, first, norm_weight, norm_bias, stored, residual_stride, first_stride, factor, eps, offset}; \
        route_rows<CONFIGURATION>(given, x, weight, gate, logit_bias, correction, factors, ids, weights, gates, experts, width, x_stride, scale); \
    }
