// Clusters of blocks and their distributed shared memory (DSMEM), of compute capability 9.0 and later.
#pragma once
#include "ptx/types.cuh"

// The attribute of a kernel whose clusters have SIZE blocks.
#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(SIZE) __cluster_dims__(SIZE, 1, 1)
#else
#define CLUSTER_OF(SIZE)
#endif

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Arrival without memory ordering, for waits that only need other blocks' accesses to have finished.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The DSMEM address, in block `rank` of the cluster, of this block's shared `address`.
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

// Stores 16 bytes to the shared memory of any block of the cluster, where an mbarrier counts them.
__device__ __forceinline__ void store_cluster_counted(u32 address, const float (&v)[4], u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])), "r"(__float_as_uint(v[3])),
        "r"(barrier)
        : "memory");
}
