// The panels of many layers of one shape in one launch: round_panel.cuh for each.
//
// A layer's tensors lie `*_step` elements behind those of the layer before, and its N output channels take `blocks` blocks.
#pragma once
#include "solve/round_panel.cuh"

#define INSTANTIATE_ROUND_PANELS(NAME, CONFIGURATION)                                                                    \
    extern "C" __global__ void __launch_bounds__(128)                                                                    \
    NAME(const float* u, const float* base, const float* w, const float* feedback, const float* diagonal,                \
         const float* factors, float* scales, float* zeros, unsigned char* codes, float* difference, double* loss,       \
         const float* shifts, i64 u_step, i64 base_step, i64 w_step, i64 feedback_step, i64 diagonal_step,               \
         i64 scales_step, i64 zeros_step, i64 codes_step, i64 difference_step, i64 loss_step, int blocks, int rows,      \
         int N, float top, float middle) {                                                                               \
        const int layer = blockIdx.x / blocks;                                                                           \
        panel::round_panel<CONFIGURATION>(                                                                               \
            blockIdx.x - layer * blocks, u + layer * u_step, base ? base + layer * base_step : base, w + layer * w_step, \
            feedback + layer * feedback_step, diagonal + layer * diagonal_step, factors, scales + layer * scales_step,   \
            zeros + layer * zeros_step, codes + layer * codes_step, nullptr, difference + layer * difference_step,       \
            loss + layer * loss_step, rows, N, top, middle, shifts[layer]);                                              \
    }
