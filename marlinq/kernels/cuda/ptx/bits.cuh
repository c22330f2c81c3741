// Integer and bit instructions on registers, and a product of floats.
#pragma once
#include "ptx/types.cuh"

// (a & mask) | bits, one instruction.
template <u32 MASK, u32 BITS>
__device__ __forceinline__ u32 and_or(u32 a) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "n"(MASK), "n"(BITS));
    return result;
}

// a | (~b & mask), one instruction.
template <u32 MASK>
__device__ __forceinline__ u32 without_or(u32 a, u32 b) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xf2;" : "=r"(result) : "r"(a), "r"(b), "n"(MASK));
    return result;
}

// |a - b| of four unsigned bytes each.
__device__ __forceinline__ u32 byte_distances(u32 a, u32 b) {
    u32 result;
    asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0));
    return result;
}

// Four bytes of b:a, each chosen by a nibble of the selector.
__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}
template <u32 SELECTOR>
__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b) {
    return permute_bytes(a, b, SELECTOR);
}

__device__ __forceinline__ int round_to_int(float value) {
    int result;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(result) : "f"(value));
    return result;
}

// The largest of the numbers of a warp's lanes.
__device__ __forceinline__ u32 warp_max(u32 number) {
    u32 result;
    asm volatile("redux.sync.max.u32 %0, %1, %2;" : "=r"(result) : "r"(number), "r"(0xffffffffu));
    return result;
}

// The sum of the numbers of a warp's lanes.
__device__ __forceinline__ u32 warp_add(u32 number) {
    u32 result;
    asm volatile("redux.sync.add.u32 %0, %1, %2;" : "=r"(result) : "r"(number), "r"(0xffffffffu));
    return result;
}

// Integers in the order of the floats, NaN above all.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float from_ordered(u32 key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// The sum of the products of four signed bytes each.
__device__ __forceinline__ u32 dot_bytes(u32 a, u32 b) {
    u32 result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0));
    return result;
}

// A product that the compiler does not fuse with an addition.
__device__ __forceinline__ float multiply_rounded(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
