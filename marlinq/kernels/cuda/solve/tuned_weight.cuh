// A weight in training (marlinq/methods/tuning.py, TunableWeight): one kernel dequantises it, one computes the gradients of its
// codes and scales.
//
//   tuned_weight     weight[k, n] = (code - zero) * stored,  stored = storable(scale * (1 + change)),
//                    code = round(clamp(latent, -reach, top + reach))
//   tuned_gradients  by_latent = d_weight * stored where the latent is within its bounds
//                    by_change = scale * the group's sum of d_weight * (code - zero)
//
// Gradients pass both roundings unchanged. Tensors of [K, N] and [groups, N] are contiguous. A thread has one of the N output
// channels. Blocks of tuned_weight have 128 of them and `rows` input channels, a part of a group; blocks of tuned_gradients 32
// and a whole group, whose rows are shared by four warps. Sums have a fixed order.
//
// Configuration: Scale (the dtype of the stored scales), Weight (Single or Bfloat16), LATENT (else codes are uint8 and stay).
#pragma once
#include "fault_site.cuh"
#include "solve/storable.cuh"

namespace tuned {

constexpr int COLUMNS = 32, WARPS = 4, THREADS = COLUMNS * WARPS;

// Type of the codes: float latents, or uint8.
template <typename C, bool LATENT = C::LATENT>
struct Given {
    typedef float type;
};
template <typename C>
struct Given<C, false> {
    typedef unsigned char type;
};

template <typename W>
struct Stored {
    typedef float type;
    static __device__ __forceinline__ float widen(float x) { return x; }
    static __device__ __forceinline__ float narrow(float x) { return x; }
};
template <>
struct Stored<Bfloat16> {
    typedef unsigned short type;
    static __device__ __forceinline__ float widen(unsigned short x) { return Bfloat16::widen(x); }
    static __device__ __forceinline__ unsigned short narrow(float x) {
        return static_cast<unsigned short>(Bfloat16::narrow(x, 0.f) & 0xffffu);
    }
};

__device__ __forceinline__ float code_of(float latent, float top, float reach) {
    return rintf(FAULT_SITE(latent_bounds, fminf(fmaxf(latent, -reach), top + reach)));
}
__device__ __forceinline__ float code_of(unsigned char code, float, float) { return static_cast<float>(static_cast<int>(code)); }

template <typename C>
__device__ __forceinline__ float stored_scale(float scale, float change) {
    return storable<typename C::Scale>(scale * (FAULT_SITE(changed_scale, 1.f + change)));
}

template <typename C>
__device__ __forceinline__ void weight(const typename Given<C>::type* given, const float* change, const float* scales,
                                       const float* zeros, typename Stored<typename C::Weight>::type* out, int N, int group,
                                       int rows, float top, float reach) {
    typedef Stored<typename C::Weight> W;
    const int columns = (N + THREADS - 1) / THREADS, part = blockIdx.x / columns;
    const int n = (blockIdx.x - part * columns) * THREADS + threadIdx.x;
    FAULT_SITE(columns_past_end, if (n >= N) return;)
    const i64 first = static_cast<i64>(part) * rows, place = FAULT_SITE(group_of_part, first / group * N) + n;
    const float scale = stored_scale<C>(scales[place], change[place]), zero = zeros[place];
#pragma unroll 8
    for (int k = 0; k < rows; ++k) {
        const i64 at = (first + k) * N + n;
        out[at] = W::narrow((code_of(given[at], top, reach) - zero) * scale);
    }
}

template <typename C>
__device__ __forceinline__ void gradients(const typename Given<C>::type* given, const float* change, const float* scales,
                                          const float* zeros, const typename Stored<typename C::Weight>::type* d_weight,
                                          float* by_change, float* by_latent, int N, int group, float top, float reach) {
    typedef Stored<typename C::Weight> W;
    __shared__ float sums[WARPS][COLUMNS];
    const int columns = (N + COLUMNS - 1) / COLUMNS, part = blockIdx.x / columns;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n = (blockIdx.x - part * columns) * COLUMNS + lane;
    const i64 place = static_cast<i64>(part) * N + n;
    float sum = 0.f;
    if (n < N) {
        const float scale = stored_scale<C>(scales[place], change[place]), zero = zeros[place];
#pragma unroll 8
        for (int k = warp; k < group; k += WARPS) {
            const i64 at = (static_cast<i64>(part) * group + k) * N + n;
            const float gradient = W::widen(d_weight[at]);
            const auto value = given[at];
            sum += gradient * (code_of(value, top, reach) - zero);
            if constexpr (C::LATENT) by_latent[at] = FAULT_SITE(gradient_bounds, value >= -reach && value <= top + reach) ? gradient * scale : 0.f;
        }
    }
    sums[warp][lane] = sum;
    FAULT_SITE(sums_of_block, __syncthreads();)
    if (warp == 0 && n < N)
        by_change[place] = FAULT_SITE(gradient_of_change, ((sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane])) * scales[place]);
}

}  // namespace tuned

#define INSTANTIATE_TUNED_WEIGHT(NAME, CONFIGURATION)                                                                    \
    extern "C" __global__ void __launch_bounds__(128)                                                                    \
    NAME(const tuned::Given<CONFIGURATION>::type* given, const float* change, const float* scales, const float* zeros,   \
         tuned::Stored<CONFIGURATION::Weight>::type* out, int N, int group, int rows, float top, float reach) {          \
        tuned::weight<CONFIGURATION>(given, change, scales, zeros, out, N, group, rows, top, reach);                     \
    }

#define INSTANTIATE_TUNED_GRADIENTS(NAME, CONFIGURATION)                                                                 \
    extern "C" __global__ void __launch_bounds__(128)                                                                    \
    NAME(const tuned::Given<CONFIGURATION>::type* given, const float* change, const float* scales, const float* zeros,   \
         const tuned::Stored<CONFIGURATION::Weight>::type* d_weight, float* by_change, float* by_latent, int N,          \
         int group, float top, float reach) {                                                                            \
        tuned::gradients<CONFIGURATION>(given, change, scales, zeros, d_weight, by_change, by_latent, N, group, top,     \
                                        reach);                                                                          \
    }
