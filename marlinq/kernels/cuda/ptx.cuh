// Thin wrappers over the PTX instructions the kernels use. Nothing here needs a CUDA header, so a kernel
// compiles wherever NVRTC itself is installed.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes of weights. They are read once, so they stay out of L1 and leave L2 first.
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

// 16 bytes that another block has written, from L2.
__device__ __forceinline__ uint4 load_l2(const void* pointer) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer)
                 : "memory");
    return value;
}

// 16 and 8 aligned bytes in one instruction each, whatever the compiler makes of the address.
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

// 16 bytes from global to shared memory; bytes from `valid` on are filled with zeros.
__device__ __forceinline__ void copy_async_16(u32 destination, const void* source, u32 valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid)
                 : "memory");
}

// Barrier `index` of the block, among `threads` threads.
__device__ __forceinline__ void barrier_sync(int index, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// (a & mask) | bits, one instruction.
template <u32 MASK, u32 BITS>
__device__ __forceinline__ u32 and_or(u32 a) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "n"(MASK), "n"(BITS));
    return result;
}

// Bytes of b:a, by four nibbles of the selector.
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

// The largest of a warp's numbers.
__device__ __forceinline__ u32 warp_max(u32 number) {
    u32 result;
    asm volatile("redux.sync.max.u32 %0, %1, %2;" : "=r"(result) : "r"(number), "r"(0xffffffffu));
    return result;
}

// The sum of the products of four signed bytes each.
__device__ __forceinline__ u32 dot_bytes(u32 a, u32 b) {
    u32 result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0));
    return result;
}

// d (16 x 8) += A (16 x 32, unsigned bytes) * B (32 x 8, signed bytes), whole numbers of 32 bits.
__device__ __forceinline__ void multiply_bytes(u32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same number or address, of which the compiler knows nothing: so it keeps nothing in registers that follows from
// the number, and reaches what is at constant distances from the address by offsets.
__device__ __forceinline__ int opaque(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
__device__ __forceinline__ const float* opaque(const float* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// The same number, of which the compiler knows that all lanes have it: it stays in a uniform register.
__device__ __forceinline__ u32 uniform(u32 number) { return __shfl_sync(0xffffffffu, number, 0); }

// Dependent launch: let the next kernel of the stream begin, and wait for the previous one's results. Kernels let the
// next one begin when they have requested their last weights: its own requests then follow in the memory's queue.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Flags between blocks: who sees a released value sees what its writer, and whoever that had waited for, wrote before.
__device__ __forceinline__ void store_release(u32* flag, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(u32* flag, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* flag) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without a memory order: others' accesses to our shared memory have been made, but nothing of ours need be visible.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in the shared memory of block `rank` of the cluster that corresponds to our `address`.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
    u32 result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
    return result;
}

__device__ __forceinline__ float4 load_cluster_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
#endif
