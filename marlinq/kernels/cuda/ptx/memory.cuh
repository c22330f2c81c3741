// Loads and stores of global and shared memory.
#pragma once
#include "fault_site.cuh"
#include "ptx/types.cuh"

// 16 bytes of weights, which are read once: they are not kept in L1.
__device__ __forceinline__ uint4 load_streaming(const uint4* pointer) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer));
    return value;
}

__device__ __forceinline__ uint4 load_cached(const void* pointer) {
    uint4 value;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer));
    return value;
}

// 16 bytes that another block has written: read from L2, since L1 may hold older ones.
__device__ __forceinline__ uint4 load_l2(const void* pointer) {
    uint4 value;
    asm volatile(FAULT_SITE(sums_through_l2, "ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];")
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer)
                 : "memory");
    return value;
}

__device__ __forceinline__ u32 load_l2_word(const u32* pointer) {
    u32 value;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

// 16 and 8 aligned bytes, always in one instruction.
__device__ __forceinline__ void store_global(void* pointer, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store_global(void* pointer, const uint2& v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(pointer), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ u32 load_u16(const u16* pointer) {
    u16 value;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(pointer));
    return value;
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
