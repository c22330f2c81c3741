// mma.sp: products of 2:4 sparse operands A, which hold 16 of 32 columns, and the places of these.
#pragma once
#include "element/bfloat16.cuh"
#include "element/half.cuh"
#include "ptx/types.cuh"

// d (16 x 8) += A (16 x 32, two of every four columns) * B (32 x 8). `mask` of lanes 2 S and 2 S + 1 of every four has the
// places of A's columns 0..15 and 16..31 in rows l/4 (low half) and l/4 + 8 (high half): two ascending places of two bits for
// every four columns, lowest first.
template <typename E, int S>
__device__ __forceinline__ void multiply_sparse(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 mask);

#define MULTIPLY_SPARSE(ELEMENT, NAME, S)                                                                                   \
    template <>                                                                                                             \
    __device__ __forceinline__ void multiply_sparse<ELEMENT, S>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 mask) { \
        asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, "              \
            "{%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"                                                      \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(mask), "n"(S));   \
    }

MULTIPLY_SPARSE(Half, "f16", 0)
MULTIPLY_SPARSE(Half, "f16", 1)
MULTIPLY_SPARSE(Bfloat16, "bf16", 0)
MULTIPLY_SPARSE(Bfloat16, "bf16", 1)
#undef MULTIPLY_SPARSE
