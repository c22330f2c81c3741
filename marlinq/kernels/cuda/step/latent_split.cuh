// The split of a sequence's positions among blocks of latent attention, for the kernels that make and that add the splits.
#pragma once
#include "ptx/types.cuh"

// Positions [first, last) of a split; `active` is the number of splits that are not empty.
struct LatentSplit {
    int first, last, active;
};
template <int TILE>
__device__ __forceinline__ LatentSplit latent_split(int tokens, int splits, int split) {
    // Whole tiles, equally many in all splits but the last.
    const int count = min(splits, (tokens + TILE - 1) / TILE), each = ((tokens + count - 1) / count + TILE - 1) / TILE * TILE;
    const int first = split * each;
    return {first, min(first + each, tokens), (tokens + each - 1) / each};
}
