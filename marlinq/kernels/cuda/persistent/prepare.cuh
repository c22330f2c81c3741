// Runs before the persistent kernel: writes the hidden state as messages of round 0, and marks all other messages as not yet sent.
//
// Messages lie in one piece of memory: the hidden state [M, H], all others.
#pragma once
#include "persistent/message.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"

template <typename E>
__device__ __forceinline__ void first_messages(const u16* hidden, float* messages, int channels, i64 others) {
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < channels; i += threads) send(messages + i, E::widen(hidden[i]), 0);
    for (i64 i = first; i < others; i += threads) send(messages + channels + i, 0.f, 1);
}

// hidden [M, H]; `channels` is M * H, `others` the number of the other messages.
#define INSTANTIATE_PREPARE_STEP(NAME, CONFIGURATION)                                                        \
    extern "C" __global__ void NAME(const u16* hidden, float* messages, int channels, i64 others) {          \
        first_messages<CONFIGURATION::Element>(hidden, messages, channels, others);                          \
    }
