// A lane's accumulators of a warpgroup's products: float [Products][TileM / 2]. Element i of product q belongs to row n of the
// lane if i / 2 is even, to row n + 8 if it is odd.
#pragma once
#include "element/pair.cuh"
#include "scale/stored_order.cuh"

// A number for each of a lane's columns: of product q, rows n and n + 8.
template <int Products>
struct PerColumn {
    float of[Products][2];

    __device__ __forceinline__ void set(float value) {
#pragma unroll
        for (int q = 0; q < Products; ++q) of[q][0] = of[q][1] = value;
    }
};

// Call it after a wait for products: it keeps the compiler, which does not know that products are asynchronous, from reading the
// sums earlier.
template <int Products, int Elements>
__device__ __forceinline__ void settle(float (&sums)[Products][Elements]) {
#pragma unroll
    for (int q = 0; q < Products; ++q)
#pragma unroll
        for (int i = 0; i < Elements; ++i) asm volatile("" : "+f"(sums[q][i])::"memory");
}

template <typename E, int Products>
__device__ __forceinline__ float scale_of(const Scales<Products>& s, int q, int i) {
    return i / 2 % 2 == 0 ? widen_half<E, 0>(s.pair[q]) : widen_half<E, 1>(s.pair[q]);
}

// sums += scales * sums of a quantisation group.
template <typename E, int Products, int Elements>
__device__ __forceinline__ void add_scaled(float (&sums)[Products][Elements], const float (&group)[Products][Elements],
                                           const Scales<Products>& s) {
#pragma unroll
    for (int q = 0; q < Products; ++q)
#pragma unroll
        for (int i = 0; i < Elements; ++i) sums[q][i] = fmaf(scale_of<E>(s, q, i), group[q][i], sums[q][i]);
}

template <typename E, int Products, int Elements>
__device__ __forceinline__ void multiply_by(float (&sums)[Products][Elements], const Scales<Products>& s) {
#pragma unroll
    for (int q = 0; q < Products; ++q)
#pragma unroll
        for (int i = 0; i < Elements; ++i) sums[q][i] *= scale_of<E>(s, q, i);
}

template <int Products, int Elements>
__device__ __forceinline__ void multiply_by(float (&sums)[Products][Elements], const PerColumn<Products>& factors) {
#pragma unroll
    for (int q = 0; q < Products; ++q)
#pragma unroll
        for (int i = 0; i < Elements; ++i) sums[q][i] *= factors.of[q][i / 2 % 2];
}
