// Multiplying weights by scales in 16 bits.
#pragma once
#include "element/pair.cuh"

// A fragment times the scales of rows n and n + 8.
template <typename E>
__device__ __forceinline__ void scale_fragment(u32 (&a)[4], u32 scales) {
    const u32 low = broadcast<0>(scales), high = broadcast<1>(scales);
    a[0] = E::multiply(a[0], low), a[2] = E::multiply(a[2], low);
    a[1] = E::multiply(a[1], high), a[3] = E::multiply(a[3], high);
}
