// 8x8 matrices of 16-bit elements between registers and shared memory, and the integer product mma.m16n8k32.
#pragma once
#include "fault_site.cuh"
#include "ptx/types.cuh"

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, but lane l gets column l / 4, rows 2 (l % 4) + {0, 1}.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Four 8x8 matrices of 16-bit elements, of which lane l holds row l / 4, columns 2 (l % 4) + {0, 1}, to memory with
// columns as rows; lane l gives the address of the row that receives column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile(FAULT_SITE(matrices_transposed, "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};") ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// An 8x8 matrix of 16-bit elements, of which lane l holds row l / 4, columns 2 (l % 4) + {0, 1}, transposed.
__device__ __forceinline__ u32 transpose_matrix(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// d (16 x 8) += A (16 x 32, unsigned bytes) * B (32 x 8, signed bytes), in 32-bit integers.
__device__ __forceinline__ void multiply_bytes(u32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
