// The next token of every row: the likeliest, or one drawn from what top-k, top-p and min-p leave.
//
// The reference is the torch code of marlinq/runtime/sampling.py; results are equal to the bit where no logarithm or exponential is
// involved. A cluster of CLUSTER blocks works on a row (one block on GPUs without clusters). Its threads
// walk over the row's logits several times, four neighbours at a step; a row's share of a block stays in L1 meanwhile:
//
//   FILTERS   the largest score
//             for top-k, then for top-p: the distance from the largest at which their count, or probability, is reached,
//             found five bits at a time from a histogram of 32 bins
//   always    the largest score, with noise where DRAWS, of those that are near enough
//
// Every thread has a histogram of its own in shared memory, so no atomic is needed, and sums always have the same order. Blocks
// read each other's sums through DSMEM.
//
// Configuration: Element, CLUSTER, THREADS, RING, DRAWS, FILTERS, PENALTY, ALIGNED (whether four neighbours are one load).
#pragma once
#include "fault_site.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/bits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "step/philox.cuh"

struct Float32 {};

namespace logits {
// Four neighbours, of which the first has a multiple of four as its index.
template <typename E>
__device__ __forceinline__ void load_four(const void* row, int index, float (&x)[4]) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const u16*>(row) + index);
    x[0] = E::widen(pairs.x & 0xffffu), x[1] = E::widen(pairs.x >> 16);
    x[2] = E::widen(pairs.y & 0xffffu), x[3] = E::widen(pairs.y >> 16);
}
template <>
__device__ __forceinline__ void load_four<Float32>(const void* row, int index, float (&x)[4]) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(row) + index);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
template <typename E>
__device__ __forceinline__ float load_one(const void* row, int index) {
    return E::widen(static_cast<const u16*>(row)[index]);
}
template <>
__device__ __forceinline__ float load_one<Float32>(const void* row, int index) {
    return static_cast<const float*>(row)[index];
}
}  // namespace logits

constexpr u32 ORDERED_INFINITY = 0xff800000u, ORDERED_MINUS_INFINITY = 0x007fffffu;

struct SampleArguments {
    const void* logits;
    i64 stride;  // elements between rows
    int vocabulary;
    const float4* values;  // reciprocal of the temperature, top-p, min-p's distance, repetition penalty
    const i64* numbers;    // seed, stream, top-k
    int* drawn;
    unsigned char* seen;
    i64* tokens;
    i64* ring;
    int batch;
};

template <typename C>
struct Sample {
    static constexpr int CLUSTER = C::CLUSTER, THREADS = C::THREADS, WARPS = THREADS / 32;
    static constexpr int BINS = 32, BITS = 5, DISTANCE_BITS = 25;
    static constexpr int BATCH = 4;  // loads of a thread in flight
    static constexpr float UNITS = 524288.f, FARTHEST = 33554430.f;
    static_assert(WARPS <= 32 && BINS % WARPS == 0, "a warp reduces what the warps leave, or whole bins");

    // Shared memory. What other blocks read is aligned to their 16-byte loads, and written again two barriers later.
    struct __align__(16) Shared {
        float bins[2][BINS];    // this block's
        uint4 best[2];          // key and inverted index, of this block
        float totals[BINS];     // the cluster's
        u32 keys[2][WARPS], indices[2][WARPS];
        u32 bin;
        float before;
        float histogram[C::FILTERS ? BINS * THREADS : 1];
    };

    const SampleArguments& a;
    Shared& shared;
    const int row;
    const u32 rank, thread, lane, warp;
    const float4 values;
    int exchanges = 0;

    // Waits until all blocks of the cluster have written what the others read.
    __device__ __forceinline__ void meet() {
        if constexpr (CLUSTER > 1) {
            FAULT_SITE(sample_blocks_met, cluster_arrive(); cluster_wait();)
        } else {
            __syncthreads();
        }
    }

    // Calls visit(index, score) for this thread's share of the row.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        const i64 offset = a.stride * row;
        const void* logits = static_cast<const char*>(a.logits) + offset * C::ELEMENT_BYTES;
        const unsigned char* seen = a.seen + (C::PENALTY ? i64(a.vocabulary) * row : 0);
        constexpr int STEP = 4 * CLUSTER * THREADS;
        for (int first = 4 * (rank * THREADS + thread); first < a.vocabulary; first += BATCH * STEP) {
            // All loads of a batch are requested before the first is used.
            float x[BATCH][4];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int index = first + b * STEP;
                if constexpr (C::ALIGNED) {
                    if (index < a.vocabulary) logits::load_four<typename C::Element>(logits, index, x[b]);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (index + i < a.vocabulary) x[b][i] = logits::load_one<typename C::Element>(logits, index + i);
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int index = first + b * STEP + i;
                    if (index >= a.vocabulary) continue;
                    float score = x[b][i];
                    if (C::PENALTY && seen[index]) score = score < 0.f ? score * values.w : score / values.w;
                    // Rounded here, not fused with what follows: distances are then those of the reference.
                    if (C::DRAWS) score = multiply_rounded(score, values.x);
                    visit(index, score);
                }
        }
    }

    // The cluster's largest key, with the lowest index that has it; `turn` is 0 the first time and 1 the second.
    __device__ __forceinline__ uint2 largest(u32 key, u32 inverted_index, int turn) {
        const auto of_warp = [](u32& key, u32& inverted) {
            const u32 most = warp_max(key);
            inverted = warp_max(key == most ? inverted : 0u);
            key = most;
        };
        of_warp(key, inverted_index);
        if (lane == 0) shared.keys[turn][warp] = key, shared.indices[turn][warp] = inverted_index;
        __syncthreads();
        key = lane < WARPS ? shared.keys[turn][lane] : 0u;
        inverted_index = lane < WARPS ? shared.indices[turn][lane] : 0u;
        of_warp(key, inverted_index);
        if constexpr (CLUSTER > 1) {
            if (thread == 0) shared.best[turn] = make_uint4(key, inverted_index, 0, 0);
            meet();
            const u32 from = lane < CLUSTER ? lane : 0;
            const float4 theirs = load_cluster_float4(cluster_address(shared_address(&shared.best[turn]), from));
            key = __float_as_uint(theirs.x), inverted_index = __float_as_uint(theirs.y);
            of_warp(key, inverted_index);
        }
        return make_uint2(key, inverted_index);
    }

    // Adds up the histograms of all threads of the cluster, when they have been counted. Warp 0 may read the sums in shared.totals.
    __device__ __forceinline__ void gather_bins() {
        float(&bins)[BINS] = shared.bins[exchanges++ % 2];
        FAULT_SITE(bins_counted, __syncthreads();)
#pragma unroll
        for (int bin = warp; bin < BINS; bin += WARPS) {
            float sum = 0.f;
#pragma unroll 4
            for (int i = lane; i < THREADS; i += 32) sum += shared.histogram[bin * THREADS + i];
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                sum += __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(sum), lane ^ distance));
            if (lane == 0) bins[bin] = sum;
        }
        meet();
        if (warp == 0) {
            if (lane < BINS / 4) {
                float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int r = 0; r < CLUSTER; ++r) {
                    float4 theirs;
                    if constexpr (CLUSTER > 1)
                        theirs = load_cluster_float4(cluster_address(shared_address(bins + 4 * lane), r));
                    else
                        theirs = *reinterpret_cast<const float4*>(bins + 4 * lane);
                    sum.x += theirs.x, sum.y += theirs.y, sum.z += theirs.z, sum.w += theirs.w;
                }
                *reinterpret_cast<float4*>(shared.totals + 4 * lane) = sum;
            }
            __syncwarp();
        }
    }

    // The smallest distance within which the weights of the nearest sum up to `wanted`, or to `share` of all if that is
    // not zero; elements beyond `limit` have none. weight(nats) is an element's.
    template <typename Weight>
    __device__ __forceinline__ u32 reach(float largest, u32 limit, float wanted, float share, Weight weight) {
        u32 prefix = 0;
        float before = 0.f;
        for (int shift = DISTANCE_BITS - BITS; shift >= 0; shift -= BITS) {
#pragma unroll 4
            for (int bin = 0; bin < BINS; ++bin) shared.histogram[bin * THREADS + thread] = 0.f;
            each([&](int, float score) {
                const float nats = largest - score;
                const u32 distance = units(nats);
                // The first level has the empty prefix, which all distances begin with.
                if (distance <= limit && distance >> (shift + BITS) == prefix)
                    shared.histogram[(distance >> shift) % BINS * THREADS + FAULT_SITE(bins_of_thread, thread)] += weight(nats);
            });
            gather_bins();
            if (warp == 0) {
                float sum = shared.totals[lane];
#pragma unroll
                for (int distance = 1; distance < 32; distance *= 2) {
                    const float lower = __uint_as_float(
                        __shfl_sync(0xffffffffu, __float_as_uint(sum), lane >= distance ? lane - distance : lane));
                    if (lane >= distance) sum += lower;
                }
                if (share != 0.f && shift == DISTANCE_BITS - BITS)
                    wanted = share * __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(sum), 31));
                // Where rounding keeps all sums below what is wanted, the last bin is taken, which keeps all.
                const u32 bin = 32 - warp_max(before + sum >= wanted ? 32 - lane : 1);
                const float below = __uint_as_float(
                    __shfl_sync(0xffffffffu, __float_as_uint(sum), bin > 0 ? bin - 1 : 0));
                if (lane == 0) shared.bin = bin, shared.before = bin > 0 ? before + below : before;
            }
            __syncthreads();
            prefix = prefix << BITS | shared.bin;
            before = shared.before;
        }
        return prefix;
    }

    // A distance in units; NaN becomes the farthest.
    static __device__ __forceinline__ u32 units(float nats) { return static_cast<u32>(fminf(nats * UNITS, FARTHEST)); }

    __device__ __forceinline__ void run() {
        const i64* numbers = a.numbers + 3 * row;
        const int drawn = a.drawn[row];
        float most = 0.f;
        u32 limit = ~0u;
        bool fault = false;
        if constexpr (C::FILTERS) {
            u32 key = 0;
            each([&](int, float score) { key = max(key, ordered(score)); });
            key = largest(key, 0, 0).x;
            fault = key >= ORDERED_INFINITY || key <= ORDERED_MINUS_INFINITY;
            most = from_ordered(key);
            if (const i64 top_k = numbers[2]; top_k > 0 && top_k < a.vocabulary)
                limit = reach(most, limit, static_cast<float>(top_k), 0.f, [](float) { return 1.f; });
            if (values.y < 1.f) limit = min(limit, reach(most, limit, 0.f, values.y, [](float nats) { return expf(-nats); }));
            limit = min(limit, units(values.z));
        }

        u32 key = 0, inverted = 0;
        Philox random(static_cast<u64>(numbers[0]));
        each([&](int index, float score) {
            if (C::FILTERS && units(most - score) > limit) return;
            if constexpr (C::DRAWS) score += random.noise(index, drawn, static_cast<u32>(numbers[1]));
            const u32 mine = ordered(score);
            if (mine > key) key = mine, inverted = ~static_cast<u32>(index);
        });
        const uint2 best = largest(key, inverted, 1);
        if constexpr (!C::FILTERS) fault = best.x >= ORDERED_INFINITY || best.x <= ORDERED_MINUS_INFINITY;
        if (rank == 0 && thread == 0) {
            // Without a winner, which only a fault can cause, there is no index.
            const i64 token = min(~best.y, static_cast<u32>(a.vocabulary) - 1);
            a.tokens[row] = token;
            a.ring[i64(drawn % C::RING) * a.batch + row] = fault ? -1 : token;
            a.drawn[row] = drawn + 1;
            if (C::PENALTY) a.seen[i64(a.vocabulary) * row + token] = 1;
        }
        // A block stays until its shared memory has been read.
        if constexpr (CLUSTER > 1) {
            FAULT_SITE(sample_memory_read, cluster_arrive_relaxed(); cluster_wait();)
        }
    }
};

template <typename C>
__device__ __forceinline__ void choose_tokens(const SampleArguments& arguments) {
    extern __shared__ __align__(16) unsigned char memory[];
    typedef Sample<C> S;
    static_assert(sizeof(typename S::Shared) == C::SHARED_BYTES, "host and kernel count different bytes of shared memory");
    launch_dependents();
    FAULT_SITE(sample_waits, wait_for_previous_kernel();)
    const int row = blockIdx.x / C::CLUSTER;
    const u32 thread = threadIdx.x;
    S{arguments,   *reinterpret_cast<typename S::Shared*>(memory), row, blockIdx.x % C::CLUSTER, thread, thread % 32,
      thread / 32, arguments.values[row]}
        .run();
}

// Bounded by one block a multiprocessor: otherwise the assembler spills registers to fit several, of which a launch has too few.
#define INSTANTIATE_SAMPLE(NAME, CONFIGURATION)                                                                     \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS, 1) CLUSTER_OF(CONFIGURATION::CLUSTER)      \
    NAME(const void* logits, i64 stride, int vocabulary, const float4* values, const i64* numbers, int* drawn,      \
         unsigned char* seen, i64* tokens, i64* ring, int batch) {                                                  \
        choose_tokens<CONFIGURATION>({logits, stride, vocabulary, values, numbers, drawn, seen, tokens, ring, batch});     \
    }
