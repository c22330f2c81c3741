// Activations as FP8 E4M3 with their scales, in one launch; a block a row.
//
//   codes[m, k] = e4m3(x[m, k] * (448 / amax))      scales = amax / 448,  amax: largest magnitude among values with the same scale
//
//   GROUP 0    a scale per row, scales[m]. The block reads the row twice, the second time from L1.
//   GROUP 128  a scale per 128 channels of a row, scales[k / 128][m]. Sixteen lanes have a group in registers.
//   GIVEN      one scale for all, *given; scales[m] are copies of it
//   FRAGMENTS  codes of every 16 channels lie in the order of codec/int4_e4m3.cuh, for kernels/warpgroup_fp8.cuh
//
// Configuration: Element, THREADS, GROUP, GIVEN, FRAGMENTS.
#pragma once
#include "fault_site.cuh"
#include "ptx/bits.cuh"
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

    // The codes of a lane's eight channels in the order of FRAGMENTS, which the lane shares with its neighbour: channels 0, 1, 8, 9 and
    // 2, 3, 10, 11 of 16, or 4, 5, 12, 13 and 6, 7, 14, 15. All lanes of the warp must call it.
    static __device__ __forceinline__ uint2 ordered(const uint2& mine) {
        if constexpr (!C::FRAGMENTS) return mine;
        const bool upper = threadIdx.x % 2;
        const u32 other = __shfl_sync(ALL_LANES, upper ? mine.x : mine.y, threadIdx.x % 32 ^ 1);
        const u32 low = upper ? other : mine.x, high = upper ? mine.y : other;
        return make_uint2(permute_bytes<FAULT_SITE(fragment_order, 0x5410u)>(low, high), permute_bytes<0x7632u>(low, high));
    }

    static __device__ __forceinline__ void run(const u16* __restrict__ x, uint2* __restrict__ codes, float* __restrict__ scales,
                                               const float* __restrict__ given, int K, int pitch, i64 x_stride) {
        const int row = blockIdx.x, thread = threadIdx.x, vectors = K / 8;
        const uint4* source = reinterpret_cast<const uint4*>(x + row * x_stride);
        uint2* target = codes + (i64)row * vectors;
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
                const uint2 found = ordered(narrow(values, LARGEST / amax));
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
            const uint2 found = ordered(narrow(values, by));
            if (exists) target[v] = found;
        });
    }
};

#define INSTANTIATE_QUANTIZE_ROWS(NAME, CONFIGURATION)                                                                   \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                                                 \
    NAME(const u16* __restrict__ x, uint2* __restrict__ codes, float* __restrict__ scales, const float* __restrict__ given, \
         int K, int pitch, i64 x_stride) {                                                                               \
        QuantizeRows<CONFIGURATION>::run(x, codes, scales, given, K, pitch, x_stride);                                   \
    }
