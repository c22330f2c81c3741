// float16 as an element: arithmetic on pairs in 32-bit registers, and the mma.sync that multiplies them.
#pragma once
#include "fault_site.cuh"
#include "element/pair.cuh"

struct Half {
    static __device__ __forceinline__ u32 add(u32 a, u32 b) {
        u32 r;
        asm("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ u32 subtract(u32 a, u32 b) {
        u32 r;
        asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
        u32 r;
        asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
        u32 r;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
        return r;
    }
    static __device__ __forceinline__ float widen(u32 bits) {
        float r;
        asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(bits));
        return r;
    }
    // Two floats to a pair, the first in the low half.
    static __device__ __forceinline__ u32 narrow(float low, float high) {
        u32 r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : FAULT_SITE(half_order, "f"(high), "f"(low)));
        return r;
    }
    // d (16 x 8) += A (16 x 16) * B (16 x 8).
    static __device__ __forceinline__ void multiply_accumulate(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
