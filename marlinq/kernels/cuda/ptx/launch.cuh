// Dependent launch (griddepcontrol), of compute capability 9.0 and later; elsewhere it does nothing.
#pragma once
#include "ptx/types.cuh"

// Lets the next kernel of the stream begin. Kernels call it when they have requested their last weights: the next kernel's
// requests then queue behind theirs.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the previous kernel's results.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
