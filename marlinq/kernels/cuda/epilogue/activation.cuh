// The activations between the products of an MLP. NONE is for products that have none.
#pragma once

enum class Activation { NONE, SILU, GELU, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU };

template <Activation KIND>
__device__ __forceinline__ float activation(float x) {
    if (KIND == Activation::SILU) return x / (1.f + exp2f(-1.44269504f * x));
    if (KIND == Activation::GELU) return 0.5f * x * (1.f + erff(0.70710678f * x));
    // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2y)); the exponential overflows to infinity at worst, which gives 0.
    if (KIND == Activation::GELU_TANH)
        return x / (1.f + exp2f(-2.88539008f * 0.79788456f * (x + 0.044715f * x * x * x)));
    const float positive = x > 0.f ? x : 0.f * x;
    return KIND == Activation::RELU ? positive : positive * positive;
}

// activation(gate) * up. CLAMPED_SWIGLU is that of GPT-OSS, (up + 1) * gate * sigmoid(1.702 gate), with gate at most 7 and up
// between -7 and 7. Comparisons keep NaN.
template <Activation KIND>
__device__ __forceinline__ float gated(float gate, float up) {
    if constexpr (KIND == Activation::CLAMPED_SWIGLU) {
        const float g = gate > 7.f ? 7.f : gate, u = up > 7.f ? 7.f : up < -7.f ? -7.f : up;
        return (u + 1.f) * g / (1.f + exp2f(-1.44269504f * 1.702f * g));
    } else {
        return activation<KIND>(gate) * up;
    }
}
