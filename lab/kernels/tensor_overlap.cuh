// What a scheduler's other instructions cost the tensor cores, and the reverse (tensor_overlap.py).
//
// LOOP 0: warpgroup 0 multiplies while warpgroups 1 and 2 execute one KIND of instruction.
// LOOP 1: all warpgroups load words, turn them into operands as MIX says, and multiply: the warpgroup kernel's loop alone.
//
// Configuration: LOOP, WARPGROUPS, TILE (columns of a product), KIND, MIX.
#pragma once
#include "codec/int4.cuh"
#include "ptx/wgmma.cuh"

constexpr int PRODUCTS = 2, ROWS = 8;

template <int KIND>
__device__ __forceinline__ void others(u32 (&r)[16]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        u32& mine = r[i % 16];
        if (KIND == 0) asm volatile("add.f16x2 %0, %0, %1;" : "+r"(mine) : "r"(0x64086408u));
        if (KIND == 1) asm volatile("prmt.b32 %0, %0, %0, 0x2103;" : "+r"(mine));
        if (KIND == 2) asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 77; @p mov.u32 %0, 1; }" : "+r"(mine));
        if (KIND == 3) asm volatile("fma.rn.f32 %0, %1, 0f3f800000, %0;" : "+r"(mine) : "r"(r[(i + 1) % 16]));
    }
}

// MIX: 0 copies, 1 masks and shifts, 2 dequantises, 3 dequantises and scales.
template <int MIX>
__device__ __forceinline__ void operand(u32 (&a)[4], u32 word, u32 scales) {
    if (MIX == 0) a[0] = a[1] = a[2] = a[3] = word;
    if (MIX == 1) {
        a[0] = word & 0x000f000f, a[2] = word >> 4 & 0x000f000f;
        a[1] = word >> 8 & 0x000f000f, a[3] = word >> 12 & 0x000f000f;
    }
    if (MIX >= 2) Int4<Half>::dequantize(word, a, Int4<Half>::offsets());
    if (MIX == 3) scale_fragment<Half>(a, scales);
}

template <typename C>
__device__ __forceinline__ void overlap(int multiplying, int multiplied, int executed, long long* cycles, u32* sink, u32 zero) {
    constexpr int LOOP = C::LOOP, TILE = C::TILE;
    __shared__ __align__(1024) unsigned char shared[40960];
    const int warpgroup = uniform(threadIdx.x / 128);
    for (int i = threadIdx.x; i < 10240; i += blockDim.x) reinterpret_cast<u32*>(shared)[i] = 0;
    __syncthreads();
    const u64 b = matrix_descriptor(shared_address(shared));
    const unsigned char* words = shared + 32768 + threadIdx.x % 32 * 16;
    u32 r[16], sum = 0, a[2][PRODUCTS][4];
    for (int i = 0; i < 16; ++i) r[i] = threadIdx.x * zero + 0x3c003c00u;
    for (int i = 0; i < 2; ++i)
        for (int q = 0; q < PRODUCTS; ++q)
            for (int j = 0; j < 4; ++j) a[i][q][j] = threadIdx.x * zero;
    const long long start = clock64();
    long long end = start;
    if (LOOP == 1 || (warpgroup == 0 && multiplying)) {
        float d[PRODUCTS][TILE / 2];
#pragma unroll
        for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
            for (int i = 0; i < TILE / 2; ++i) d[q][i] = 0.f;
        for (int turn = 0; turn < multiplied; ++turn) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                u32 w[PRODUCTS];
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q)
                    w[q] = LOOP == 1 ? *reinterpret_cast<const volatile u32*>(words + 512 * i + 4 * q) : 0;
                matrix_fence();
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q) matrix_multiply_half<TILE, true>(d[q], a[i % 2][q], b);
                matrix_commit();
                matrix_wait<1>();
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q) {
                    u32(&next)[4] = a[(i + 1) % 2][q];
                    if (LOOP == 1) operand<C::MIX>(next, w[q], r[q]);
                    // Without it the assembler takes the loop for one that reads its sums.
                    if (LOOP == 0)
                        for (int j = 0; j < 4; ++j) asm volatile("mov.b32 %0, %0;" : "+r"(next[j]));
                }
            }
            matrix_wait<0>();
        }
        end = clock64();
#pragma unroll
        for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
            for (int i = 0; i < TILE / 2; ++i) sum += __float_as_uint(d[q][i]);
    } else if (warpgroup > 0) {
        for (int turn = 0; turn < executed; ++turn) others<C::KIND>(r);
        end = clock64();
    }
    for (int i = 0; i < 16; ++i) sum += r[i];
    sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    if (threadIdx.x % 128 == 0 && blockIdx.x == 5) cycles[warpgroup] = end - start;
}

#define INSTANTIATE_TENSOR_OVERLAP(NAME, CONFIGURATION)                                                             \
    extern "C" __global__ void __launch_bounds__(128 * CONFIGURATION::WARPGROUPS, 1)                                \
    NAME(int multiplying, int multiplied, int executed, long long* cycles, u32* sink, u32 zero) {                   \
        overlap<CONFIGURATION>(multiplying, multiplied, executed, cycles, sink, zero);                              \
    }
