// Before the persistent kernel: the hidden state as the messages of round 0, and all other messages to a round that has not been.
//
// Messages lie in one piece of memory: the residual stream [M, H], its squares [M, H / 16], all others.
#pragma once
#include "persistent/message.cuh"
#include "element/bfloat16.cuh"
#include "element/half.cuh"

template <typename E>
__device__ __forceinline__ void first_messages(const u16* hidden, float* messages, int blocks, i64 others) {
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 index = first; index < blocks; index += threads) {
        // 16 channels.
        float square = 0.f;
        for (int i = 0; i < 16; ++i) {
            const float value = E::widen(hidden[index * 16 + i]);
            send(messages + index * 16 + i, value, 0);
            square += value * value;
        }
        send(messages + (i64)blocks * 16 + index, square, 0);
    }
    float* rest = messages + (i64)blocks * 17;
    for (i64 i = first; i < others; i += threads) send(rest + i, 0.f, 1);
}

// hidden [M, H]; `blocks` is M * H / 16, `others` the number of the other messages.
#define INSTANTIATE_PREPARE_STEP(NAME, CONFIGURATION)                                                        \
    extern "C" __global__ void NAME(const u16* hidden, float* messages, int blocks, i64 others) {            \
        first_messages<CONFIGURATION::Element>(hidden, messages, blocks, others);                            \
    }
