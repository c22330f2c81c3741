// What the scales of the warpgroup kernel multiply.
#pragma once

enum class Scaling {
    WEIGHTS,  // the fragments of dequantised weights, in 16 bits
    SUMS,     // float accumulators, when a quantisation group, which is a chunk then, or all of K ends
    FUSED,    // the codes, in the instruction that subtracts the zero point of 8 (codec/int4_scaled.cuh)
};
