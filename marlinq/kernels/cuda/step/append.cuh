// Queries, keys and values of a prompt's tokens: normalised, rotated, and keys and values put into the cache (step/heads.cuh).
//
//   rows of the product [M]  ->  q [M, heads, D],  keys, values [B, kv_heads, capacity, D] at the rows' positions
//
// Row m is token m % T of sequence m / T, at position lengths[m / T] + m % T. A warp takes one head; with SHARED there are queries
// alone.
//
// Configuration: Element, D, WARPS, and those of step/heads.cuh.
#pragma once
#include "ptx/launch.cuh"
#include "step/heads.cuh"

template <typename C>
__device__ __forceinline__ void append(const NewHeads& given, u32* q, u32* keys, u32* values, const int* lengths, int T,
                                       int capacity) {
    typedef Head<C> Mine;
    __shared__ float shared_heads[C::WARPS][C::D];
    __shared__ float sums[2][C::WARPS];
    launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int heads = given.heads, kv_heads = given.kv_heads, all_heads = heads + (C::SHARED ? 0 : 2 * kv_heads);
    const int blocks = (all_heads + C::WARPS - 1) / C::WARPS;
    const i64 m = blockIdx.x / blocks;
    const int head = blockIdx.x % blocks * C::WARPS + warp;
    wait_for_previous_kernel();
    const int sequence = m / T, position = load_scalar(lengths + sequence) + m % T;
    const u32* row = given.row(m);
    const WideSquares<C> wide(given, row, sums);
    // Tokens beyond the cache's capacity are dropped; callers check lengths before.
    if (head >= all_heads || position >= capacity) return;
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const int kv_head = is_value ? head - heads - kv_heads : head - heads;
    Mine mine;
    mine.load(row + given.place(head) * (C::D / 2), lane);
    if (!is_value) {
        const typename Mine::Angles angles(given, position, lane);
        mine.transform(given, is_query, is_query ? head : kv_head, wide, angles, shared_heads[warp], lane);
    } else {
        mine.transform_value(given);
    }
    const i64 place = ((i64)sequence * kv_heads + kv_head) * capacity + position;
    mine.store((is_query ? q + (m * heads + head) * (C::D / 2) : (is_value ? values : keys) + place * (C::D / 2)), lane);
}

#define INSTANTIATE_STEP_APPEND(NAME, CONFIGURATION)                                                          \
    extern "C" __global__ void __launch_bounds__(32 * CONFIGURATION::WARPS, 2)                                \
    NAME(NewHeads given, u32* q, u32* keys, u32* values, const int* lengths, int T, int capacity) {           \
        append<CONFIGURATION>(given, q, keys, values, lengths, T, capacity);                                  \
    }
