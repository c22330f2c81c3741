// The values that scales multiply in the warpgroup kernel.
#pragma once

enum class Scaling {
    WEIGHTS,  // the fragments of dequantised weights, in 16 bits
    SUMS,     // float accumulators, at the end of a quantisation group (here a chunk) or of K
    FUSED,    // the codes, in the instruction that subtracts the zero point of 8 (codec/int4_scaled.cuh)
};
