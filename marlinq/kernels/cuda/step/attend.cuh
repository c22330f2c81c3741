// Attention of one new token per sequence over its cache, whose last entry is the token itself.
//
//   out[b, h] = softmax(scale * q[b, h] . keys[b, h / group]) . values[b, h / group]      over positions 0..lengths[b]
//
// A block takes one sequence, one head of keys and values, up to 8 of its query heads, and one split of the positions. Its
// warps take tiles of 16 positions in turns and multiply by mma.sync, with positions as rows, so that 8 query heads fill the
// columns:
//
//   S (16 positions x 8 heads)  += K (16 x 32 channels) Q^T          both operands straight from memory: a lane's 16 bytes are
//                                                                     8 neighbouring channels of one row, for K and Q alike
//   O (16 channels x 8 heads)   += V^T (16 x 16 positions) P^T        lane (u, v) loads channels 8u..8u+7 of four positions and
//                                                                     pairs their halves; P turns by movmatrix
//
// The block begins with what belongs to the new token: its warps normalise and rotate the queries (step/heads.cuh), and in the
// split that ends with the newest position its key and value, which the block of the first query heads puts into the cache.
//
// With heads of more than 256 channels a block takes them in slices of 128, so that a tile's keys, and its values, don't fill the
// registers beside the sums.
//
// A tile's keys and values are loaded straight to registers, which they share in turns: many warps hide each other's waits,
// and more than 64 KB in flight to a multiprocessor arrive later (docs/kernels.md, "Chunks in flight"). The first ones and the
// lengths are requested before the previous kernel has ended: both are there, since a step's first kernel waits for the whole step
// before.
//
// Warps add up their results in shared memory. The splits of a head are then added in one of two ways. As a cluster (CLUSTER > 1)
// each block adds a share of the channels, and reads the other blocks' sums through DSMEM. Otherwise every block writes to `partials`,
// and the one that finishes last adds them up, in order, and resets their counter. Splits
// that have no positions end at once. Splits are chosen on the device, so a captured launch serves every length.
//
// With SHARED the keys and values are another layer's, and the new tokens' are in the cache: the block reads them there once the
// previous kernel has ended, where it would make them otherwise.
//
// With TOGETHER > 1 the rows are up to TOGETHER neighbouring tokens of one sequence. The cache holds the tokens before the first
// of them. A block then makes the keys and values of all rows up to its own that fall into its split, and puts its own into the
// cache.
//
// With GATES the result is multiplied by the sigmoid of gates, or with SOFTPLUS by their softplus. With SINKS the exponential of sinks[h]
// is added to the sum of a head's exponentials, once.
//
// Configuration: Element, D, WARPS, MIN_BLOCKS, CLUSTER (1, or the splits), TOGETHER, GATES, SOFTPLUS, SINKS, SOFTCAP, and those of
// step/heads.cuh, but WIDE only where TOGETHER is 1; SHARED_BYTES, the host's count of dynamic shared memory.
#pragma once
#include "fault_site.cuh"
#include "ptx/bits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/flags.cuh"
#include "ptx/launch.cuh"
#include "ptx/matrix.cuh"
#include "step/heads.cuh"

constexpr int ATTEND_HEADS = 8, ATTEND_TILE = 16, ATTEND_SLICE = 128;

// Place of a row's gates: behind each head of queries (`each` is 2), or behind all heads, one for each channel or each head of the result.
enum class Gates { NONE, QUERIES, CHANNELS, HEADS };

// Multiplies `x` by the sigmoid or the softplus of a gate.
template <typename C>
__device__ __forceinline__ void apply_gate(float& x, float gate) {
    if constexpr (C::SOFTPLUS) {
        // log(1 + e) loses the digits of a small e; then it is e - e * e / 2.
        const float e = expf(-fabsf(gate)), log = e < 1e-3f ? e - 0.5f * e * e : logf(1.f + e);
        x *= gate > 0.f ? gate + log : log;
    } else {
        x /= 1.f + expf(-gate);
    }
}

// A compile-time bool as an argument.
template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// Positions [first, last) of a split; `active` is the number of splits that are not empty.
struct Split {
    int first, last, active;
};
template <typename C>
__device__ __forceinline__ Split split_of(int tokens, int window, int splits, int split) {
    constexpr int STEP = ATTEND_TILE * C::WARPS;
    const int begin = tokens > window ? tokens - window : 0, count = tokens - begin;
    // Splits so few that each has a tile for every warp, and of equal numbers of tiles; the last may have fewer.
    const int active = min(splits, (count + STEP - 1) / STEP);
    const int each = ((count + active - 1) / active + ATTEND_TILE - 1) / ATTEND_TILE * ATTEND_TILE;
    const int first = begin + split * each;
    return {first, min(first + each, tokens), (count + each - 1) / each};
}

template <typename C>
__device__ __forceinline__ void attend(const NewHeads& given, u16* keys, u16* values, u16* out, float* partials, u32* counters,
                                       const int* lengths, const float* sinks, int group, int chunks, int splits, int capacity, int window,
                                       i64 out_stride, float scale, float softcap) {
    typedef typename C::Element E;
    constexpr int D = C::D, WARPS = C::WARPS, TILE = ATTEND_TILE, HEADS = ATTEND_HEADS;
    constexpr int SLICES = D > 256 ? (D + ATTEND_SLICE - 1) / ATTEND_SLICE : 1, WIDTH = SLICES == 1 ? D : ATTEND_SLICE;
    constexpr int KEY_CHUNKS = (WIDTH + 31) / 32, VALUE_GROUPS = (WIDTH + 63) / 64;  // of a slice
    static_assert(D <= 512, "registers hold the sums of 512 channels");
    constexpr int STEP = TILE * WARPS, TOGETHER = C::TOGETHER;
    static_assert(TOGETHER == 1 || !C::WIDE, "sums of squares are of one row");
    // In shared memory: sums of the warps, the new token's heads, and scratch in which a warp rotates them.
    constexpr int SUMS = HEADS * D, FRESH_AT = WARPS * SUMS * 4, TURNING_AT = FRESH_AT + (HEADS + 2 * TOGETHER) * D * 2;
    static_assert(C::SHARED_BYTES == TURNING_AT + WARPS * D * 4, "host and kernel count different bytes of shared memory");
    constexpr int SLOT = HEADS * (D + 2);  // floats that a split leaves
    const float LOWEST = __uint_as_float(0xff800000u);  // minus infinity
    extern __shared__ __align__(128) unsigned char shared[];
    // Queries of the new token, then keys and values of new tokens in turns.
    u32* fresh = reinterpret_cast<u32*>(shared + FRESH_AT);
    float(*turning)[D] = reinterpret_cast<float(*)[D]>(shared + TURNING_AT);
    __shared__ float squares[2][WARPS];
    __shared__ float maxima[WARPS][HEADS];
    __shared__ float totals[WARPS][HEADS];
    constexpr bool MEETS = C::CLUSTER > 1;
    __shared__ u32 arrived;
    __shared__ float4 merged[MEETS ? HEADS : 1];  // a block's maximum and total of each head
    launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, u = lane / 4, v = lane % 4;
    const int split = blockIdx.x % splits, work = blockIdx.x / splits;
    const int chunk = work % chunks, pair = work / chunks, kv_head = pair % given.kv_heads, sequence = pair / given.kv_heads;
    const i64 row = (i64)(TOGETHER > 1 ? kv_head : pair) * capacity;
    // The cache holds `old` tokens; the row's own stands at `length`.
    const int length = load_scalar(lengths + sequence), tokens = min(length + 1, capacity);
    const int old = TOGETHER > 1 ? load_scalar(lengths) : length;
    const Split part = split_of<C>(tokens, window, splits, split);
    if (split >= part.active) {
        if constexpr (MEETS) {
            // Splits without positions take part in the cluster's barriers, for which the others wait.
            for (int barrier = 0; barrier < 2 && part.active > 1; ++barrier) {
                cluster_arrive_relaxed();
                cluster_wait();
            }
        }
        return;
    }
    const int last = part.last, heads = min(HEADS, group - chunk * HEADS);
    const int first_head = kv_head * group + chunk * HEADS;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 k[2][KEY_CHUNKS], w[VALUE_GROUPS][4];
    // This lane's first vectors of the sequence.
    const u16 *my_keys = keys + (row + u) * D + 8 * v, *my_values = values + (row + 2 * v) * D + 8 * u;
    // Those of new tokens, [first_new, last), are not in the cache yet.
    const int first_new = old < last ? max(old, part.first) : 0x7fffffff, last_old = min(last, first_new);
    const int news = old < last ? last - first_new : 0;
    const auto is_new = [&](int token) {
        return TOGETHER > 1 ? token >= first_new && token < last : token == first_new;
    };
    const auto load_keys = [&](int tile, int slice) {
        const u16* from = my_keys + (i64)tile * D + WIDTH * slice;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) {
                const int token = tile + u + 8 * h;
                const int channel = WIDTH * slice + 32 * c;
                const bool there = token < last_old && (channel + 24 < D || channel + 8 * v < D);
                k[h][c] = there ? load_l2(from + 8 * h * D + 32 * c) : zero;
            }
    };
    const auto load_values = [&](int tile, int slice) {
        const u16* from = my_values + (i64)tile * D + WIDTH * slice;
#pragma unroll
        for (int g = 0; g < VALUE_GROUPS; ++g)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int behind = i % 2 + 8 * (i / 2), token = tile + 2 * v + behind;
                const int channel = WIDTH * slice + 64 * g;
                const bool there = token < last_old && (channel + 56 < D || channel + 8 * u < D);
                w[g][i] = there ? load_l2(from + behind * D + 64 * g) : zero;
            }
    };
    const int first_tile = part.first + TILE * warp;
    // EARLY: the keys of a warp's first tile are requested here, before the previous kernel has ended, as it may from compute capability
    // 9.0 on. This tile has a copy of the loop's body (FIRST), in which the sums of the output are still the constant 0 while its keys
    // are in registers: there is no room for both. Heads in slices need that copy on every GPU.
    // VALUES_EARLY: the first tile's values are requested here, too. On 9.0 alone: code for later GPUs would spill registers.
    constexpr bool EARLY = __CUDA_ARCH__ >= 900 || SLICES > 1, VALUES_EARLY = __CUDA_ARCH__ == 900 && SLICES == 1;
    if (EARLY) load_keys(first_tile, 0);
    if (VALUES_EARLY) load_values(first_tile, 0);
    const typename Head<C>::Angles angles(given, min(length, capacity - 1), lane);
    FAULT_SITE(attention_waits, wait_for_previous_kernel();)
    const u32* new_row = given.row(sequence);
    const WideSquares<C> wide(given, new_row, squares);
    // Queries, then the key and the value. Columns of the product that are no head stay zero.
#pragma unroll 1
    for (int item = warp; item < heads + 2 * news; item += WARPS) {
        const bool is_query = item < heads;
        const int at = is_query ? item : HEADS + item - heads, is_value = is_query ? 0 : (item - heads) % 2;
        const int number = is_query ? first_head + item : given.heads + is_value * given.kv_heads + kv_head;
        const int position = TOGETHER == 1 || is_query ? length : first_new + (item - heads) / 2;
        Head<C> mine;
        const u32* cached = reinterpret_cast<const u32*>(is_value ? values : keys) + (row + position) * (D / 2);
        const bool is_cached = C::SHARED && !is_query;
        const u32* made = (TOGETHER == 1 ? new_row : given.row(position - old)) + given.place(number) * (D / 2);
        mine.load(is_cached ? cached : made, lane);
        if (is_cached) {
        } else if (is_value) {
            mine.transform_value(given);
        } else {
            const int of_kind = is_query ? first_head + item : kv_head;
            if (TOGETHER == 1) {
                mine.transform(given, is_query, of_kind, wide, angles, turning[warp], lane);
            } else {
                const typename Head<C>::Angles own(given, min(position, capacity - 1), lane);
                mine.transform(given, is_query, of_kind, wide, own, turning[warp], lane);
            }
        }
        mine.store(fresh + at * (D / 2), lane);
        if (!C::SHARED && !is_query && position == length && chunk == 0)
            mine.store(reinterpret_cast<u32*>(is_value ? values : keys) + (row + length) * (D / 2), lane);
    }
    for (int i = threadIdx.x; i < (HEADS - heads) * (D / 2); i += 32 * WARPS) fresh[heads * (D / 2) + i] = 0;
    FAULT_SITE(heads_there, __syncthreads();)
    const u32 fresh_at = shared_address(shared) + FRESH_AT, my_queries = fresh_at + u * (D * 2) + v * 16;
    // Of head 2v + j: the maximum that all lanes know, and this lane's part of the sum.
    float maximum[2] = {LOWEST, LOWEST}, total[2] = {0.f, 0.f};
    constexpr int GROUPS = SLICES * VALUE_GROUPS;
    float o[GROUPS][4][4];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) o[g][i][r] = 0.f;
    const auto take = [&](int tile, auto is_first) {
        constexpr bool FIRST = decltype(is_first)::value;
        if (!FIRST) load_keys(tile, 0);
        const bool new_here = FAULT_SITE(newest_token, tile < last) && first_new < tile + TILE;
        float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            if (slice) load_keys(tile, slice);
            if (new_here) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int c = 0; c < KEY_CHUNKS; ++c) {
                        const int token = tile + u + 8 * h, slot = HEADS + (TOGETHER > 1 ? 2 * (token - first_new) : 0);
                        const int channel = WIDTH * slice + 32 * c + 8 * v;
                        if (is_new(token) && channel < D) k[h][c] = load_shared(fresh_at + (slot * D + channel) * 2);
                    }
            }
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) {
                // Queries are read again for every tile: kept in registers, they would leave room for fewer blocks.
                const int channel = WIDTH * slice + 32 * c;
                const uint4 queries = channel + 8 * v < D ? load_shared(my_queries + 2 * channel) : zero;
                const u32 low[4] = {k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y};
                const u32 high[4] = {k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w};
                E::multiply_accumulate(s, low, queries.x, queries.y);
                E::multiply_accumulate(s, high, queries.z, queries.w);
            }
        }
        if (!FIRST || !VALUES_EARLY) load_values(tile, 0);
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // Exponents are of 2, so scale has the logarithm of e in it.
            p[j] = C::SOFTCAP ? softcap * tanhf(s[j] * scale) : s[j] * scale;
            if (tile + u + 8 * (j / 2) >= last) p[j] = LOWEST;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float most = p[j] > p[j + 2] ? p[j] : p[j + 2];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                const float other = of_lane(most, lane ^ distance);
                most = other > most ? other : most;
            }
            most = most > maximum[j] ? most : maximum[j];
            const float shrink = FIRST ? 0.f : exp2f(maximum[j] - most);
            maximum[j] = most;
            p[j] = exp2f(p[j] - most);
            p[j + 2] = exp2f(p[j + 2] - most);
            total[j] = FIRST ? p[j] + p[j + 2] : total[j] * shrink + p[j] + p[j + 2];
            if (!FIRST)
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    o[g][i][j] *= shrink;
                    o[g][i][j + 2] *= shrink;
                }
        }
        const u32 b0 = transpose_matrix(E::narrow(p[0], p[1])), b1 = transpose_matrix(E::narrow(p[2], p[3]));
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            if (slice) load_values(tile, slice);
            if (new_here) {
#pragma unroll
                for (int g = 0; g < VALUE_GROUPS; ++g)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int token = tile + 2 * v + i % 2 + 8 * (i / 2);
                        const int slot = HEADS + 1 + (TOGETHER > 1 ? 2 * (token - first_new) : 0);
                        const int channel = WIDTH * slice + 64 * g + 8 * u;
                        if (is_new(token) && channel < D) w[g][i] = load_shared(fresh_at + (slot * D + channel) * 2);
                    }
            }
#pragma unroll
            for (int g = 0; g < VALUE_GROUPS; ++g) {
                const u32 pairs[4][4] = {{w[g][0].x, w[g][0].y, w[g][0].z, w[g][0].w},
                                         {w[g][1].x, w[g][1].y, w[g][1].z, w[g][1].w},
                                         {w[g][2].x, w[g][2].y, w[g][2].z, w[g][2].w},
                                         {w[g][3].x, w[g][3].y, w[g][3].z, w[g][3].w}};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // Low halves of two positions are a row of channels, high halves the next one.
                    const u32 a[4] = {
                        permute_bytes<0x5410>(pairs[0][i], pairs[1][i]), permute_bytes<0x7632>(pairs[0][i], pairs[1][i]),
                        permute_bytes<0x5410>(pairs[2][i], pairs[3][i]), permute_bytes<0x7632>(pairs[2][i], pairs[3][i])};
                    E::multiply_accumulate(o[slice * VALUE_GROUPS + g][i], a, b0, b1);
                }
            }
        }
    };
    int tile = first_tile;
    if (EARLY && tile < last) {
        take(tile, Flag<true>{});
        tile += STEP;
    }
#pragma unroll 1
    for (; tile < last; tile += STEP) take(tile, Flag<false>{});
    // Address of the sums of `channel` and the next three of `head`. A warp stores sums of heads 0, 2, 4 and 6 at once, which in plain
    // order would lie in the same banks. So the index of the vector has bit 0 flipped for heads 2, 3, 6 and 7, and bit 2 for heads 4 to 7
    // where D is a multiple of 32.
    const auto sums = [&](int of_warp, int head, int channel) {
        const int turned = head / 2 % 2 | (D % 32 == 0 ? head / 4 % 2 << 2 : 0);
        return reinterpret_cast<float4*>(shared) + (of_warp * SUMS + head * D) / 4 + (channel / 4 ^ turned);
    };
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) total[j] += of_lane(total[j], lane ^ distance);
        if (u == 0) {
            maxima[warp][2 * v + j] = maximum[j];
            totals[warp][2 * v + j] = total[j];
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            if (64 * g + 8 * u < D) {
                const int head = 2 * v + j, channel = 64 * g + 8 * u;
                *sums(warp, head, channel) = make_float4(o[g][0][j], o[g][0][j + 2], o[g][1][j], o[g][1][j + 2]);
                *sums(warp, head, channel + 4) = make_float4(o[g][2][j], o[g][2][j + 2], o[g][3][j], o[g][3][j + 2]);
            }
    }
    FAULT_SITE(warps_there, __syncthreads();)
    // Addresses are computed here: kept from the beginning, they would take registers that the tiles need.
    const auto store_result = [&](int head, int channel, float x0, float x1, float x2, float x3) {
        if constexpr (C::GATES == Gates::HEADS) {
            const int number = first_head + head;
            const u32 both = load_l2_word(given.row(sequence) + given.gates(C::SHARED) * (D / 2) + number / 2);
            const float gate = number % 2 ? widen_half<E, 1>(both) : widen_half<E, 0>(both);
            apply_gate<C>(x0, gate), apply_gate<C>(x1, gate), apply_gate<C>(x2, gate), apply_gate<C>(x3, gate);
        } else if constexpr (C::GATES != Gates::NONE) {
            const int number = first_head + head;
            const int place = C::GATES == Gates::QUERIES ? given.place(number) + 1 : given.gates(C::SHARED) + number;
            const u32* gates = given.row(sequence) + place * (D / 2) + channel / 2;
            const u32 low = load_l2_word(gates), high = load_l2_word(gates + 1);
            apply_gate<C>(x0, widen_half<E, 0>(low)), apply_gate<C>(x1, widen_half<E, 1>(low));
            apply_gate<C>(x2, widen_half<E, 0>(high)), apply_gate<C>(x3, widen_half<E, 1>(high));
        }
        u16* to = out + sequence * out_stride + (first_head + head) * D + channel;
        store_global(to, make_uint2(E::narrow(x0, x1), E::narrow(x2, x3)));
    };
    // The sum of a head's exponentials in units of 2^most, with its sink's.
    const auto with_sink = [&](int head, float most, float whole) {
        return C::SINKS ? whole + exp2f(sinks[first_head + head] * 1.44269504f - most) : whole;
    };
    float* slots = partials + (i64)work * splits * SLOT;
    for (int index = threadIdx.x; index < heads * (D / 4); index += 32 * WARPS) {
        const int head = index / (D / 4), channel = index % (D / 4) * 4;
        float most = LOWEST, whole = 0.f, x[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < WARPS; ++i) most = maxima[i][head] > most ? maxima[i][head] : most;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const float share = exp2f(maxima[i][head] - most);
            const float4 found = *sums(i, head, channel);
            whole += share * totals[i][head];
            x[0] += share * found.x, x[1] += share * found.y, x[2] += share * found.z, x[3] += share * found.w;
        }
        if (part.active == 1) {
            whole = with_sink(head, most, whole);
            store_result(head, channel, x[0] / whole, x[1] / whole, x[2] / whole, x[3] / whole);
        } else if constexpr (MEETS) {
            // No other thread of the block reads these.
            *sums(0, head, channel) = make_float4(x[0], x[1], x[2], x[3]);
            if (channel == 0) merged[head] = make_float4(most, whole, 0.f, 0.f);
        } else {
            float* slot = slots + split * SLOT;
            *reinterpret_cast<float4*>(slot + head * D + channel) = make_float4(x[0], x[1], x[2], x[3]);
            if (channel == 0) {
                slot[HEADS * D + 2 * head] = most;
                slot[HEADS * D + 2 * head + 1] = whole;
            }
        }
    }
    if (part.active == 1) return;
    // Adds up the splits, in order: load(i, head, channel, most, whole) gives four sums of split i, and
    // the maximum and total of its head. The block is one of `blocks` that share the heads' channels.
    const auto add_splits = [&](int block, int blocks, auto load) {
        for (int index = block * 32 * WARPS + threadIdx.x; index < heads * (D / 4); index += blocks * 32 * WARPS) {
            const int head = index / (D / 4), channel = index % (D / 4) * 4;
            float most = LOWEST, whole = 0.f, x[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int i = 0; i < part.active; ++i) {
                float their, their_total;
                const float4 found = load(i, head, channel, their, their_total);
                const float higher = their > most ? their : most;
                const float shrink = exp2f(most - higher), share = exp2f(their - higher);
                most = higher;
                whole = whole * shrink + their_total * share;
                x[0] = x[0] * shrink + share * found.x;
                x[1] = x[1] * shrink + share * found.y;
                x[2] = x[2] * shrink + share * found.z;
                x[3] = x[3] * shrink + share * found.w;
            }
            whole = with_sink(head, most, whole);
            store_result(head, channel, x[0] / whole, x[1] / whole, x[2] / whole, x[3] / whole);
        }
    };
    if constexpr (MEETS) {
        FAULT_SITE(splits_met, cluster_arrive(); cluster_wait();)
        add_splits(split, part.active, [&](int i, int head, int channel, float& most, float& whole) {
            const float4 numbers = load_cluster_float4(cluster_address(shared_address(merged + head), i));
            most = numbers.x, whole = numbers.y;
            return load_cluster_float4(cluster_address(shared_address(sums(0, head, channel)), i));
        });
        // A block stays until its shared memory has been read.
        FAULT_SITE(splits_read, cluster_arrive_relaxed(); cluster_wait();)
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived = add_acquire_release(counters + work, 1);
        if (arrived == part.active - 1) store_relaxed(counters + work, 0);
    }
    __syncthreads();
    if (arrived != part.active - 1) return;
    add_splits(0, 1, [&](int i, int head, int channel, float& most, float& whole) {
        const float* slot = slots + i * SLOT;
        const u32* numbers = reinterpret_cast<const u32*>(slot) + HEADS * D + 2 * head;
        const uint4 found = load_l2(slot + head * D + channel);
        most = __uint_as_float(load_l2_word(numbers)), whole = __uint_as_float(load_l2_word(numbers + 1));
        return make_float4(__uint_as_float(found.x), __uint_as_float(found.y), __uint_as_float(found.z),
                           __uint_as_float(found.w));
    });
}

#define INSTANTIATE_STEP_ATTEND(NAME, CONFIGURATION)                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * CONFIGURATION::WARPS, CONFIGURATION::MIN_BLOCKS)                    \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                                    \
    NAME(NewHeads given, u16* keys, u16* values, u16* out, float* partials, u32* counters, const int* lengths,            \
         const float* sinks, int group, int chunks, int splits, int capacity, int window, i64 out_stride, float scale,    \
         float softcap) {                                                                                                 \
        attend<CONFIGURATION>(given, keys, values, out, partials, counters, lengths, sinks, group, chunks, splits, capacity, \
                              window, out_stride, scale, softcap);                                                        \
    }
