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

#ifndef LAB_BARE
#define LAB_BARE 0  // stages are requested and handed over, and nothing else is done
#endif
#ifndef LAB_SOURCE
#define LAB_SOURCE 0  // where weights are read (persistent/lab_source.cuh); 1: no scales
#endif

// What it does otherwise, with the same results.
#ifndef LAB_POLL
#define LAB_POLL 1  // who waits asks again for: 0: one word, 1: all that is missing, 2: a word a lane, 3: one of each vector
#endif
#ifndef LAB_LEAST_CHUNKS
#define LAB_LEAST_CHUNKS 2  // of the cache that are worth a part
#endif
#ifndef LAB_PARTS_AT_ONCE
#define LAB_PARTS_AT_ONCE 4  // of a context, whose trips overlap
#endif
#ifndef LAB_TURNS
#define LAB_TURNS 0  // 1: teams have neighbouring tiles of eight
#endif
#ifndef LAB_LATE_ROOT
#define LAB_LATE_ROOT 0  // 1: qkv's sums are normalised by who reads them
#endif
#ifndef LAB_WIDE
#define LAB_WIDE 0  // stages on their way while the block does not wait for messages; 0: as ever
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
