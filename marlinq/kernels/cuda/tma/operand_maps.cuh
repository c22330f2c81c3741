// Tensor maps of a product's operands, as the host makes them (driver/tensor_maps.py).
#pragma once
#include "ptx/tensor_copy.cuh"

// Maps of x [M, K] with swizzled boxes of 64 columns. `tile` has the rows of a tile, or all rows of a smaller batch; `rest` has
// the remaining M % TILE_M rows.
struct ActivationMaps {
    TensorMap tile, rest;
};

// Maps of FP8 activations, with boxes of 128 columns, of their scales [scales of a row, M], and of their sums: pairs [M, pairs of a row],
// in boxes of 32 pairs.
struct ScaledActivationMaps : ActivationMaps {
    TensorMap scales;
    ActivationMaps sums;
};

// Maps of words [stored rows, N/64, words of a tile] and of scales and zeros [G, N/64, 64].
struct WeightMaps {
    TensorMap words, scales, zeros;
};

// Types of activations: BYTES of a channel; ROW_SCALES: whether rows have scales; CHUNK_SCALES: one for each chunk, not for all channels;
// SUM_CHANNELS: channels whose sums are a chunk of their own, 0 where products need no sums.
struct SixteenBits {
    typedef ActivationMaps Maps;
    static constexpr int BYTES = 2, SUM_CHANNELS = 0;
    static constexpr bool ROW_SCALES = false, CHUNK_SCALES = false;
};
template <bool Chunks>
struct EightBits {
    typedef ScaledActivationMaps Maps;
    static constexpr int BYTES = 1, SUM_CHANNELS = 32 * 128;
    static constexpr bool ROW_SCALES = true, CHUNK_SCALES = Chunks;
};
