// What lab/kernels/persistent_step.py leaves out of the persistent kernel, to see what the rest takes, and its trace. Outside of
// the lab nothing is left out.
#pragma once
#include "ptx/types.cuh"

#ifndef LAB_NO_WAIT
#define LAB_NO_WAIT 0  // messages are taken for there
#endif
#ifndef LAB_NO_PRODUCTS
#define LAB_NO_PRODUCTS 0  // stages are handed over and not multiplied
#endif
#ifndef LAB_NO_COPIES
#define LAB_NO_COPIES 0  // stages are handed over and not filled
#endif

// Notes the clock as mark `id` of `kind`, in one layer in the middle.
#ifdef LAB_TRACE
#define MARK(kind, id)                                                        \
    if (round == 10 && lane == 0) {                                           \
        u64 now;                                                              \
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");         \
        step.trace[(blockIdx.x * 5 + (kind)) * 64 + (id)] = now;              \
    }
#else
#define MARK(kind, id) {}
#endif
