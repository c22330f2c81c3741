// Activations as FP8 E4M3 with their scales, in one launch; a block a row.
//
//   codes[m, k] = e4m3(x[m, k] * (448 / amax))      scales = amax / 448,  amax: largest magnitude among values with the same scale
//
//   GROUP 0    a scale per row, scales[m]. The block reads the row twice, the second time from L1.
//   GROUP 128  a scale per 128 channels of a row, scales[k / 128][m]. Sixteen lanes have a group in registers.
//   GIVEN      one scale for all, *given; scales[m] are copies of it
//   FRAGMENTS  for kernels/warpgroup_fp8.cuh: codes of every 32 channels lie in the order of codec/int4_e4m3.cuh, and sums[m, g] of every
//              128 channels are written, in the products' unit, as a pair of elements that add up to it. A row has 32 pairs for every
//              32 groups or part of them, the last ones 0
//
// Configuration: Element, THREADS, GROUP, GIVEN, FRAGMENTS.
#pragma once
#include "fault_site.cuh"
#include "codec/e4m3.cuh"
#include "ptx/bits.cuh"
#include "ptx/launch.cuh"
#include "ptx/narrow.cuh"
#include "step/rows.cuh"

template <typename C>
struct QuantizeRows {
    typedef typename C::Element E;
    static constexpr int THREADS = C::THREADS, WARPS = THREADS / 32, GROUP = C::GROUP;
    static constexpr float LARGEST = 448.f, LEAST = 1e-30f;  // of E4M3; of the magnitudes that scales are computed from
    static_assert(GROUP == 0 || GROUP == 128, "sixteen lanes have a group");

    static __device__ __forceinline__ float largest(const float (&x)[8]) {
        float found = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) found = fmaxf(found, fabsf(x[i]));
        return found;
    }
    // The largest value among 2 * HALF neighbouring lanes.
    template <int HALF>
    static __device__ __forceinline__ float largest_of_lanes(float value) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int distance = HALF; distance > 0; distance /= 2) value = fmaxf(value, of_lane(value, lane ^ distance));
        return value;
    }
    static __device__ __forceinline__ uint2 narrow(const float (&x)[8], float by) {
        return make_uint2(narrow_to_e4m3(x[0] * by, x[1] * by) | narrow_to_e4m3(x[2] * by, x[3] * by) << 16,
                          narrow_to_e4m3(x[4] * by, x[5] * by) | narrow_to_e4m3(x[6] * by, x[7] * by) << 16);
    }

    // A lane's eight codes in the order of FRAGMENTS, of the 32 channels that it shares with three neighbours: channels 0, 1, 16, 17, 2, 3,
    // 18, 19 in the first of them. All lanes of the warp must call it.
    static __device__ __forceinline__ uint2 ordered(const uint2& mine) {
        if constexpr (!C::FRAGMENTS) return mine;
        const int lane = threadIdx.x % 32, from = lane / 4 * 4 + lane % 4 / 2;
        const auto four_of = [&](int source) {
            const u32 x = __shfl_sync(ALL_LANES, mine.x, source), y = __shfl_sync(ALL_LANES, mine.y, source);
            return lane % 2 ? y : x;
        };
        const u32 low = four_of(from), high = four_of(from + 2);
        return make_uint2(permute_bytes<FAULT_SITE(fragment_order, 0x5410u)>(low, high), permute_bytes<0x7632u>(low, high));
    }
    // The sum of 8 codes' values.
    static __device__ __forceinline__ float sum_of(const uint2& mine) {
        const u32 pairs[4] = {E4m3<Half>::widened(mine.x << 8), E4m3<Half>::widened(mine.x), E4m3<Half>::widened(mine.y << 8),
                              E4m3<Half>::widened(mine.y)};
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += widen_half<Half, 0>(pairs[i]) + widen_half<Half, 1>(pairs[i]);
        return sum * 256.f;
    }
    // Writes the sum of the 128 channels that sixteen lanes have. A code is taken for code minus 8 in units of 2^-9 (codec/int4_e4m3.cuh),
    // so what the products contain too much is the sum times 8 / 512.
    static __device__ __forceinline__ void write_sum(u32* row_sums, int v, const uint2& mine, float scale, bool exists) {
        if constexpr (C::FRAGMENTS) {
            float sum = sum_of(mine);
#pragma unroll
            for (int distance = 8; distance > 0; distance /= 2) sum += of_lane(sum, threadIdx.x % 32 ^ distance);
            const float wanted = FAULT_SITE(code_sums, -0.015625f) * scale * sum;
            const float first = widen_half<E, 0>(E::narrow(wanted, 0.f));
            if (exists && v % 16 == 0) row_sums[v / 16] = E::narrow(first, wanted - first);
        }
    }

    static __device__ __forceinline__ void run(const u16* __restrict__ x, uint2* __restrict__ codes, float* __restrict__ scales,
                                               const float* __restrict__ given, u32* __restrict__ sums, int K, int pitch,
                                               i64 x_stride) {
        launch_dependents();
        const int row = blockIdx.x, thread = threadIdx.x, vectors = K / 8;
        const uint4* source = reinterpret_cast<const uint4*>(x + row * x_stride);
        uint2* target = codes + (i64)row * vectors;
        const int groups = K / 128, pairs = (groups + 31) / 32 * 32;
        u32* row_sums = sums + (i64)row * pairs;
        if (C::FRAGMENTS && groups + thread < pairs) row_sums[groups + thread] = 0;
        // Calls use(v, values, exists) for the thread's vectors, with whole warps: lanes work together.
        const auto each_vector = [&](auto use) {
            for (int first = thread / 32 * 32; first < vectors; first += THREADS) {
                const int v = first + thread % 32;
                const bool exists = v < vectors;
                float values[8];
                widen_vector<E>(values, exists ? source[v] : make_uint4(0, 0, 0, 0));
                use(v, values, exists);
            }
        };
        if constexpr (GROUP == 128) {
            each_vector([&](int v, const float (&values)[8], bool exists) {
                const float amax = fmaxf(largest_of_lanes<8>(largest(values)), LEAST);
                const uint2 mine = narrow(values, LARGEST / amax), found = ordered(mine);
                write_sum(row_sums, v, mine, amax / LARGEST, exists);
                if (!exists) return;
                target[v] = found;
                if (v % 16 == 0) scales[(i64)(v / 16) * pitch + row] = FAULT_SITE(group_scale, amax / LARGEST);
            });
            return;
        }
        float by, scale;
        if constexpr (C::GIVEN) {
            scale = *given, by = 1.f / scale;
        } else {
            __shared__ float of_warps[WARPS];
            float amax = LEAST;
            each_vector([&](int, const float (&values)[8], bool) { amax = fmaxf(amax, largest(values)); });
            amax = largest_of_lanes<16>(amax);
            if (thread % 32 == 0) of_warps[thread / 32] = amax;
            FAULT_SITE(row_maxima_there, __syncthreads();)
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) amax = fmaxf(amax, of_warps[warp]);
            scale = amax / LARGEST, by = LARGEST / amax;
        }
        if (thread == 0) scales[row] = scale;
        each_vector([&](int v, const float (&values)[8], bool exists) {
            const uint2 mine = narrow(values, by), found = ordered(mine);
            write_sum(row_sums, v, mine, 1.f, exists);
            if (exists) target[v] = found;
        });
    }
};

#define INSTANTIATE_QUANTIZE_ROWS(NAME, CONFIGURATION)                                                                   \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                                                 \
    NAME(const u16* __restrict__ x, uint2* __restrict__ codes, float* __restrict__ scales, const float* __restrict__ given, \
         u32* __restrict__ sums, int K, int pitch, i64 x_stride) {                                                       \
        QuantizeRows<CONFIGURATION>::run(x, codes, scales, given, sums, K, pitch, x_stride);                             \
    }
