// Attention of the persistent kernel. A unit is a head of keys with all queries that share it, and a part of the context. Its block receives the sums of its columns of qkv, applies norms and rotary embedding, and appends the new key
// and value to the cache (the last part does). Chunks of the cache come through the ring.
//
// Operands are swapped as in the products: keys are operand A, queries operand B. Scores of a chunk's positions lie as accumulators;
// transposed, they are operand B of the product with the values. Sums are taken online (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018). The new position's share is added apart, since its key is not in the cache yet.
#pragma once
#include "persistent/products.cuh"
#include "persistent/residual.cuh"

constexpr float LOG2_E = 1.44269504f;

template <typename S, typename Codec>
struct Attention {
    typedef typename Codec::Element E;
    static constexpr int D = S::HEAD_DIM, PAIRS = D / 64;
    static constexpr int BLOCKS = S::CHUNK / 16;  // of positions
    static constexpr int SLICE = D / 16 / S::TEAM;  // 16-channel blocks that a warp of a team brings

    const StepArguments& step;
    const Plan<S>& plan;
    unsigned char* shared;
    int warp, lane;

    __device__ __forceinline__ void run(Multiplier<S, Codec>& walk, const StepLayer& layer, u32 round) const {
#pragma unroll 1
        for (int index = blockIdx.x; index < plan.units; index += gridDim.x) {
            const AttentionUnit unit = plan.unit(index);
            const Chunks<S> chunks(unit, plan.length, layer.window);
            const int queries = plan.queries;
            const bool last = unit.split == unit.splits - 1;
            bool met = false;
            for (int vector = warp; vector < queries + (last ? 2 : 0); vector += S::WARPS)
                prepare(layer, unit, vector, queries, round, met);
            if (!met) meet<S>();
            meet<S>();
            attend(walk, chunks, queries);
            const int entries = min(chunks.count, S::TEAMS);
            if (last)
                for (int h = warp; h < queries; h += S::WARPS) score_new(h);
            meet<S>();
            merge(unit, entries, last, queries, round);
        }
    }

private:
    __device__ __forceinline__ unsigned char* memory() const { return shared + S::ACTIVATIONS_AT; }
    __device__ __forceinline__ float* fresh() const { return reinterpret_cast<float*>(memory() + S::NEW_AT); }  // key, value
    __device__ __forceinline__ float* new_scores() const { return reinterpret_cast<float*>(memory() + S::SCORES_AT); }
    // Entry e: outputs [query][D], then maxima and sums [query][2].
    __device__ __forceinline__ float* entry(int e, int queries) const {
        return reinterpret_cast<float*>(memory() + S::ENTRIES_AT) + e * queries * (D + 2);
    }
    // Where channel d of query h is, in rows of 64 channels as the products' activations.
    static __device__ __forceinline__ int query_at(int h, int d) {
        return d / 64 * 1024 + h * 128 + ((d % 64 / 8 ^ h) * 16) + d % 8 * 2;
    }

    // Query `vector` of the unit's head, or its key, or its value.
    __device__ __forceinline__ void prepare(const StepLayer& layer, const AttentionUnit& unit, int vector, int queries, u32 round,
                                            bool& met) const {
        const bool key = vector == queries, value = vector > queries;
        const int N = step.shape[QKV].tiles * 64;
        const int head = key ? step.heads + unit.kv_head : value ? step.heads + step.kv_heads + unit.kv_head : unit.kv_head * queries + vector;
        // Lane l has PAIRS neighbouring channels of the lower half and as many of the upper one, which rotate together.
        const int position = plan.length;
        Letters<PARTS * 2, PAIRS> letters;
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                letters.request(p * 2 + half, step.parts[QKV] + (i64)p * N + head * D + channel(half, 0));
        float shift[2][PAIRS] = {}, c[PAIRS], s[PAIRS], x[2][PAIRS];
        const auto load_tables = [&] {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                c[i] = layer.cosines[position * (D / 2) + channel(0, i)], s[i] = layer.sines[position * (D / 2) + channel(0, i)];
                if (layer.bias[QKV] != nullptr)
                    for (int half = 0; half < 2; ++half) shift[half][i] = E::widen(layer.bias[QKV][head * D + channel(half, i)]);
            }
        };
        // Large heads' registers are too few for both.
        if (D <= 128) load_tables();
        await(round, letters);
        if (D > 128) load_tables();
        if (!met) meet<S>();  // memory is free
        met = true;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                float sum = 0.f;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) sum += letters.value(p * 2 + half, i);
                x[half][i] = rounded<E>(sum + shift[half][i]);
            }
        const float* gamma = value ? nullptr : key ? layer.key_gamma : layer.query_gamma;
        if (gamma != nullptr) {
            float square = 0.f;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) square += x[0][i] * x[0][i] + x[1][i] * x[1][i];
            const float root = fast_reciprocal_root(warp_sum(square) * (1.f / D) + step.query_eps);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) {
                    const float normal = x[half][i] * root;
                    x[half][i] = rounded<E>((step.narrow_first ? rounded<E>(normal) : normal) * gamma[channel(half, i)]);
                }
        }
        if (!value) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float lower = x[0][i], upper = x[1][i];
                x[0][i] = rounded<E>(lower * c[i] - upper * s[i]), x[1][i] = rounded<E>(upper * c[i] + lower * s[i]);
            }
        }
        const i64 appended = ((i64)unit.kv_head * step.capacity + position) * D;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int d = channel(half, i);
                const u16 narrow = (u16)E::narrow(x[half][i], x[half][i]);
                if (key || value) {
                    fresh()[value ? D + d : d] = x[half][i];
                    (value ? layer.value_cache : layer.key_cache)[appended + d] = narrow;
                } else {
                    *reinterpret_cast<u16*>(memory() + query_at(vector, d)) = narrow;
                }
            }
    }
    __device__ __forceinline__ int channel(int half, int i) const { return half * (D / 2) + PAIRS * lane + i; }

    // Scores as logarithms to base 2 of what they weigh.
    __device__ __forceinline__ float weighed(float score) const {
        if (!S::SOFTCAP) return score * (step.scale * LOG2_E);
        // tanh(u) = 1 - 2 / (e^(2u) + 1)
        const float twice = fast_exp2(2.f * LOG2_E * step.scale * score * fast_reciprocal(step.softcap));
        return LOG2_E * step.softcap * (1.f - 2.f * fast_reciprocal(twice + 1.f));
    }
    static __device__ __forceinline__ float over_rows(float value, bool largest) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            const float other = __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(value), threadIdx.x % 32 ^ distance));
            value = largest ? max(value, other) : value + other;
        }
        return value;
    }

    // The unit's chunks: chunk j by the team that owns its stage. Each of its warps takes all scores, and the outputs of its own
    // channels.
    __device__ __forceinline__ void attend(Multiplier<S, Codec>& walk, const Chunks<S>& chunks, int queries) const {
        int j = walk.team - walk.next;
        if (j < 0) j += S::TEAMS;
        walk.next = (walk.next + chunks.count) % S::TEAMS;
        if (j >= chunks.count) return;
        float* mine = entry(j, queries);
        float top[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f}, out[SLICE][4];
#pragma unroll
        for (int d = 0; d < SLICE; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[d][i] = 0.f;
#pragma unroll 1
        for (; j < chunks.count; j += S::TEAMS) {
            walk.ring.wait_full();
            add_chunk(walk.ring.address(), (chunks.begin + j) * S::CHUNK, chunks, walk.member, top, sum, out);
            walk.release_stage();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float all = over_rows(sum[i], false);
            const int h = 2 * (lane % 4) + i;
            if (h >= queries) continue;
            if (walk.member == 0 && lane / 4 == 0) {
                mine[queries * D + 2 * h] = top[i];
                mine[queries * D + 2 * h + 1] = all;
            }
#pragma unroll
            for (int d = 0; d < SLICE; ++d) {
                float* at = mine + h * D + 16 * (walk.member * SLICE + d) + lane / 4;
                at[0] = out[d][i], at[8] = out[d][i + 2];
            }
        }
    }
    __device__ __forceinline__ void add_chunk(u32 stage, int position, const Chunks<S>& chunks, int member, float (&top)[2], float (&sum)[2],
                                              float (&out)[SLICE][4]) const {
        // Opaque, so that addresses are not kept in registers from chunk to chunk.
        const int lane = opaque(this->lane);
        const u32 query = shared_address(memory());
        float score[BLOCKS][4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; k += 2) {
            u32 q[4];
            load_matrix_x4(q, query + k / 4 * 1024 + lane % 8 * 128 + (((2 * (k % 4) + lane / 8) ^ lane % 8) * 16));
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int t = 0; t < BLOCKS; ++t) {
                    u32 a[4];
                    const int row = 16 * t + lane / 8 % 2 * 8 + lane % 8, piece = 2 * ((k + half) % 4) + lane / 16;
                    load_matrix_x4(a, stage + k / 4 * S::POSITION_SLAB_BYTES + row * 128 + ((piece ^ row % 8) * 16));
                    E::multiply_accumulate(score[t], a, q[2 * half], q[2 * half + 1]);
                }
        }
        float highest[2] = {-1e30f, -1e30f};
#pragma unroll
        for (int t = 0; t < BLOCKS; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int p = position + 16 * t + lane / 4 + 8 * (i / 2);
                const bool seen = p >= chunks.first_position && p < chunks.length;
                score[t][i] = seen ? weighed(score[t][i]) : -1e30f;
                highest[i % 2] = max(highest[i % 2], score[t][i]);
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            highest[i] = max(over_rows(highest[i], true), top[i]);
            const float before = fast_exp2(top[i] - highest[i]);
            top[i] = highest[i], sum[i] *= before;
#pragma unroll
            for (int d = 0; d < SLICE; ++d) out[d][i] *= before, out[d][i + 2] *= before;
        }
        u32 b[BLOCKS][2];
#pragma unroll
        for (int t = 0; t < BLOCKS; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // A position that doesn't count weighs 2^-1e30, but where none has counted yet.
                score[t][i] = score[t][i] == -1e30f ? 0.f : fast_exp2(score[t][i] - top[i % 2]);
                sum[i % 2] += score[t][i];
            }
            b[t][0] = transpose_matrix(E::narrow(score[t][0], score[t][1]));
            b[t][1] = transpose_matrix(E::narrow(score[t][2], score[t][3]));
        }
#pragma unroll
        for (int d = 0; d < SLICE; ++d)
#pragma unroll
            for (int t = 0; t < BLOCKS; ++t) {
                u32 a[4];
                const int block = member * SLICE + d, row = 16 * t + lane / 16 * 8 + lane % 8, piece = 2 * (block % 4) + lane / 8 % 2;
                load_matrix_x4_transposed(a, stage + S::CACHE_BYTES + block / 4 * S::POSITION_SLAB_BYTES + row * 128 + ((piece ^ row % 8) * 16));
                E::multiply_accumulate(out[d], a, b[t][0], b[t][1]);
            }
    }
    __device__ __forceinline__ void score_new(int h) const {
        float score = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; ++i) {
            const int d = i * 32 + lane;
            score += E::widen(*reinterpret_cast<const u16*>(memory() + query_at(h, d))) * fresh()[d];
        }
        score = warp_sum(score);
        if (lane == 0) new_scores()[h] = weighed(score);
    }
    __device__ __forceinline__ void merge(const AttentionUnit& unit, int entries, bool last, int queries, u32 round) const {
        const int channels = step.heads * D;
        for (int index = 32 * warp + lane; index < queries * D; index += 32 * S::WARPS) {
            const int h = index / D, d = index % D, head = unit.kv_head * queries + h;
            float top = last ? new_scores()[h] : -1e30f;
            for (int e = 0; e < entries; ++e) top = max(top, entry(e, queries)[queries * D + 2 * h]);
            // The new position is an entry of its own.
            float sum = last ? fast_exp2(new_scores()[h] - top) : 0.f, out = last ? sum * fresh()[D + d] : 0.f;
            for (int e = 0; e < entries; ++e) {
                const float* it = entry(e, queries);
                const float share = fast_exp2(it[queries * D + 2 * h] - top);
                sum = fmaf(share, it[queries * D + 2 * h + 1], sum);
                out = fmaf(share, it[h * D + d], out);
            }
            const i64 part = unit.split;
            send(step.attention + part * channels + head * D + d, sum > 0.f ? out * fast_reciprocal(sum) : 0.f, round);
            if (d == 0) send(step.attention_weight + part * step.heads + head, sum > 0.f ? top + fast_log2(sum) : -1e30f, round);
        }
    }
};
