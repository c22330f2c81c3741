// Dependent launch (griddepcontrol), of compute capability 9.0 and later; elsewhere it does nothing.
#pragma once
#include "ptx/types.cuh"

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
