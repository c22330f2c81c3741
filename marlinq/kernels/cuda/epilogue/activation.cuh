// The activations between the products of an MLP. NONE is for products that have none.
#pragma once

enum class Activation { NONE, SILU, GELU, GELU_TANH, RELU, RELU2 };

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
