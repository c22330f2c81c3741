// Floats to FP8 E4M3, from compute capability 8.9 on.
#pragma once
#include "fault_site.cuh"
#include "ptx/types.cuh"

// Two floats, rounded to nearest, to two bytes, the first in the low one; beyond 448 they are 448.
__device__ __forceinline__ u32 narrow_to_e4m3(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : FAULT_SITE(e4m3_order, "f"(high), "f"(low)));
    return r;
}
