// Barriers, bulk copies and warpgroup matrix instructions of compute capability 9.0 (PTX ISA, chapters mbarrier,
// cp.async.bulk and wgmma).
#pragma once
#include "ptx.cuh"

// A CUtensorMap, opaque.
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

// Whether this lane is the one of its warp, all of whose lanes ask, that acts for all. In a branch on nothing but this and what the
// warp agrees on, the compiler knows that a single lane is active. Elsewhere it puts a loop over lanes around each tensor
// copy, whose operands are in uniform registers, and 80 cycles a copy with it.
__device__ __forceinline__ bool elected() {
    u32 chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
    return chosen;
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive once and expect `bytes` more to be copied before the phase ends.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of that parity is over. What other blocks of the cluster stored for it is visible then.
__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// The map's box at element `x` of row `y` of plane `z`, for data that is read once: it leaves L2 first.
// Elements outside the tensor arrive as zeros and count as bytes.
__device__ __forceinline__ void copy_box_once(u32 destination, const TensorMap* map, int x, int y, int z, u32 barrier) {
    const u64 evict_first = 0x12f0000000000000ull;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], "
        "[%5], %6;" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(evict_first)
        : "memory");
}

// As above, of a map of two dimensions and for data that others read too.
__device__ __forceinline__ void copy_box(u32 destination, const TensorMap* map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// Four 8x8 matrices of 16-bit elements, of which lane l holds row l / 4, columns 2 (l % 4) + {0, 1}, to memory with
// columns as rows; lane l gives the address of the row that receives column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_shared(u32 address, const float (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(__float_as_uint(v[0])),
                 "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])), "r"(__float_as_uint(v[3]))
                 : "memory");
}

// 16 bytes to the shared memory of any block of the cluster, counted by a barrier there.
__device__ __forceinline__ void store_cluster_counted(u32 address, const float (&v)[4], u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])), "r"(__float_as_uint(v[3])),
        "r"(barrier)
        : "memory");
}

// An 8x8 matrix of 16-bit elements, of which lane l holds row l / 4, columns 2 (l % 4) + {0, 1}, transposed.
__device__ __forceinline__ u32 transpose_matrix(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

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

// Descriptor of a K-major operand in rows of 128 bytes with the 128-byte swizzle; atoms of 8 rows lie 1024 bytes apart.
// It grows with the address, by one for 16 bytes.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
    constexpr u32 HIGH = 1024 >> 4 | 1u << 30;
    return (u64)HIGH << 32 | (address >> 4 | 1u << 16);
}

// d (64 x COLUMNS, this lane's share) = A (64 x 16, registers) * B (16 x COLUMNS, shared memory), added to d with ADD.
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
#define MATRIX(COLUMNS, TYPE, REGISTERS, OPERANDS, ...)                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " \
                 OPERANDS ", 1, 1, 0;"                                                                      \
                 : __VA_ARGS__                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD))
#define MATRIX_FUNCTION(NAME, TYPE)                                                                         \
    template <int COLUMNS, bool ADD>                                                                        \
    __device__ __forceinline__ void NAME(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b) {               \
        if constexpr (COLUMNS == 8) MATRIX(8, TYPE, "%0,%1,%2,%3", "{%4,%5,%6,%7}, %8, %9", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])); \
        if constexpr (COLUMNS == 16) MATRIX(16, TYPE, R0, "{%8,%9,%10,%11}, %12, %13", D8(0)); \
        if constexpr (COLUMNS == 32) MATRIX(32, TYPE, R0 R1, "{%16,%17,%18,%19}, %20, %21", D8(0), D8(8)); \
        if constexpr (COLUMNS == 48) MATRIX(48, TYPE, R0 R1 R2, "{%24,%25,%26,%27}, %28, %29", D8(0), D8(8), D8(16)); \
        if constexpr (COLUMNS == 64) MATRIX(64, TYPE, R0 R1 R2 R3, "{%32,%33,%34,%35}, %36, %37", D8(0), D8(8), D8(16), D8(24)); \
        if constexpr (COLUMNS == 80) MATRIX(80, TYPE, R0 R1 R2 R3 R4, "{%40,%41,%42,%43}, %44, %45", D8(0), D8(8), D8(16), D8(24), D8(32)); \
        if constexpr (COLUMNS == 96) MATRIX(96, TYPE, R0 R1 R2 R3 R4 R5, "{%48,%49,%50,%51}, %52, %53", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40)); \
        if constexpr (COLUMNS == 112) MATRIX(112, TYPE, R0 R1 R2 R3 R4 R5 R6, "{%56,%57,%58,%59}, %60, %61", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48)); \
        if constexpr (COLUMNS == 128) MATRIX(128, TYPE, R0 R1 R2 R3 R4 R5 R6 R7, "{%64,%65,%66,%67}, %68, %69", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56)); \
        if constexpr (COLUMNS == 144) MATRIX(144, TYPE, R0 R1 R2 R3 R4 R5 R6 R7 R8, "{%72,%73,%74,%75}, %76, %77", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64)); \
        if constexpr (COLUMNS == 160) MATRIX(160, TYPE, R0 R1 R2 R3 R4 R5 R6 R7 R8 R9, "{%80,%81,%82,%83}, %84, %85", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64), D8(72)); \
        if constexpr (COLUMNS == 176) MATRIX(176, TYPE, R0 R1 R2 R3 R4 R5 R6 R7 R8 R9 R10, "{%88,%89,%90,%91}, %92, %93", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64), D8(72), D8(80)); \
    }
MATRIX_FUNCTION(matrix_multiply_half, "f16")
MATRIX_FUNCTION(matrix_multiply_bfloat16, "bf16")
#undef MATRIX_FUNCTION
#undef MATRIX
#undef D8
