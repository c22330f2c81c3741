// Matrix instructions of a warpgroup and its registers, of compute capability 9.0 alone (PTX ISA, chapter wgmma).
#pragma once
#include "ptx/types.cuh"

template <int COUNT>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void matrix_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps `value` in its register until here. A sparse product reads its places while it runs, but ptxas (CUDA 13.0) gives their
// register to other values as soon as the product is issued: it reserves registers of A until the wait, not this one. So behind the
// wait stands a store of the places, which cannot move before the wait and never happens: `address`, in dynamic shared memory, is
// not 0, as static barriers lie before it, but no compiler knows that.
__device__ __forceinline__ void keep_in_register(u32 value, u32 address) {
    asm volatile("{ .reg .pred never; setp.eq.u32 never, %1, 0; @never st.shared.u32 [%1], %0; }" ::"r"(value), "r"(address) : "memory");
}

// Descriptor of a K-major operand in rows of 128 bytes with the 128-byte swizzle; atoms of 8 rows lie 1024 bytes apart.
// Adding 1 to it moves the operand by 16 bytes.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
    constexpr u32 HIGH = 1024 >> 4 | 1u << 30;
    return (u64)HIGH << 32 | (address >> 4 | 1u << 16);
}

// d (64 x COLUMNS, this lane's share) = A (64 x 16, registers) * B (16 x COLUMNS, shared memory), added to d with ADD. A sparse A is
// 64 x 32, of which the registers hold two of every four columns; lanes 2 SELECTOR and 2 SELECTOR + 1 of every four hold their
// places, as for mma.sp (mma/multiply_sparse.cuh).
// The accumulators are passed eight at a time: R<i> names their registers, D8 lists them as operands.
#define R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define R3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define R4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define R5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define R6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define R7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define R8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define R9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define R10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define D8(i)                                                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
// ADDS and PLACES name the operands behind A and B: whether to add, and the places with their selector.
#define DENSE(COLUMNS, TYPE, REGISTERS, OPERANDS, ADDS, PLACES, ...)                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " \
                 OPERANDS ", " ADDS ", 1, 1, 0;"                                                            \
                 : __VA_ARGS__                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD))
#define SPARSE(COLUMNS, TYPE, REGISTERS, OPERANDS, ADDS, PLACES, ...)                                          \
    asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" #COLUMNS "k32.f32." TYPE "." TYPE " {" REGISTERS "}, " \
                 OPERANDS ", " PLACES ", " ADDS ", 1, 1, 0;"                                                   \
                 : __VA_ARGS__                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD), "r"(places), "n"(SELECTOR))
#define BYTES(COLUMNS, TYPE, REGISTERS, OPERANDS, ADDS, PLACES, ...)                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32." TYPE "." TYPE " {" REGISTERS "}, " \
                 OPERANDS ", " ADDS ", 1, 1;"                                                               \
                 : __VA_ARGS__                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD))
#define MATRIX_BODY(MATRIX, TYPE) \
    if constexpr (COLUMNS == 8) MATRIX(8, TYPE, "%0,%1,%2,%3", "{%4,%5,%6,%7}, %8", "%9", "%10, %11", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])); \
    if constexpr (COLUMNS == 16) MATRIX(16, TYPE, R0, "{%8,%9,%10,%11}, %12", "%13", "%14, %15", D8(0)); \
    if constexpr (COLUMNS == 32) MATRIX(32, TYPE, R0 R1, "{%16,%17,%18,%19}, %20", "%21", "%22, %23", D8(0), D8(8)); \
    if constexpr (COLUMNS == 48) MATRIX(48, TYPE, R0 R1 R2, "{%24,%25,%26,%27}, %28", "%29", "%30, %31", D8(0), D8(8), D8(16)); \
    if constexpr (COLUMNS == 64) MATRIX(64, TYPE, R0 R1 R2 R3, "{%32,%33,%34,%35}, %36", "%37", "%38, %39", D8(0), D8(8), D8(16), D8(24)); \
    if constexpr (COLUMNS == 80) MATRIX(80, TYPE, R0 R1 R2 R3 R4, "{%40,%41,%42,%43}, %44", "%45", "%46, %47", D8(0), D8(8), D8(16), D8(24), D8(32)); \
    if constexpr (COLUMNS == 96) MATRIX(96, TYPE, R0 R1 R2 R3 R4 R5, "{%48,%49,%50,%51}, %52", "%53", "%54, %55", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40)); \
    if constexpr (COLUMNS == 112) MATRIX(112, TYPE, R0 R1 R2 R3 R4 R5 R6, "{%56,%57,%58,%59}, %60", "%61", "%62, %63", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48)); \
    if constexpr (COLUMNS == 128) MATRIX(128, TYPE, R0 R1 R2 R3 R4 R5 R6 R7, "{%64,%65,%66,%67}, %68", "%69", "%70, %71", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56)); \
    if constexpr (COLUMNS == 144) MATRIX(144, TYPE, R0 R1 R2 R3 R4 R5 R6 R7 R8, "{%72,%73,%74,%75}, %76", "%77", "%78, %79", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64)); \
    if constexpr (COLUMNS == 160) MATRIX(160, TYPE, R0 R1 R2 R3 R4 R5 R6 R7 R8 R9, "{%80,%81,%82,%83}, %84", "%85", "%86, %87", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64), D8(72)); \
    if constexpr (COLUMNS == 176) MATRIX(176, TYPE, R0 R1 R2 R3 R4 R5 R6 R7 R8 R9 R10, "{%88,%89,%90,%91}, %92", "%93", "%94, %95", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64), D8(72), D8(80));
#define MATRIX_FUNCTIONS(NAME, TYPE)                                                                                  \
    template <int COLUMNS, bool ADD>                                                                                 \
    __device__ __forceinline__ void matrix_multiply_##NAME(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b) {      \
        MATRIX_BODY(DENSE, TYPE)                                                                                     \
    }                                                                                                                \
    template <int COLUMNS, bool ADD, int SELECTOR>                                                                   \
    __device__ __forceinline__ void matrix_multiply_sparse_##NAME(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, \
                                                                  const u32& places) {                               \
        MATRIX_BODY(SPARSE, TYPE)                                                                                    \
    }
MATRIX_FUNCTIONS(half, "f16")
MATRIX_FUNCTIONS(bfloat16, "bf16")
// A and B in FP8, 32 channels: a register has four of them.
template <int COLUMNS, bool ADD>
__device__ __forceinline__ void matrix_multiply_e4m3(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b) {
    MATRIX_BODY(BYTES, "e4m3")
}
#undef MATRIX_FUNCTIONS
#undef MATRIX_BODY
#undef BYTES
#undef SPARSE
#undef DENSE
#undef D8
