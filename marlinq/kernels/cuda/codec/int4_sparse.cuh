// int4 of 2:4 sparse weights: of every four channels two are kept, in any places.
//
// A tile is 32 channels x 64 columns. Its 16 kept channels have the words of a tile of int4 (codec/int4.cuh), in two planes
// (codec/lane_words.cuh), and their places lie behind. The tensor cores multiply both with 32 channels of activations in the time of
// 16 (mma/multiply_sparse.cuh):
//
//   lane l, word q       block q: columns n = 16 q + l/4 + {0, 8}, kept channels 2 (l%4) + {0, 1, 8, 9}
//   lane l, places j     block q = 2 j + l%4/2: places of channels 16 (l%2) .. + 15, of column 16 q + l/4 in the low half,
//                        of column 16 q + l/4 + 8 in the high half
//
// Four bits for every four channels, lowest first: the two places, ascending, of two bits each. The tensor cores read the places
// of a block from two lanes of every four, so a register serves two blocks.
#pragma once
#include "codec/int4.cuh"

template <typename E>
struct SparseInt4 : Int4<E> {
    static constexpr int ROW_CHANNELS = 32, PLANES = 2, LANE_BYTES = 8, TILE_BYTES = 512 + 2 * PLACE_BYTES;
    static constexpr bool SPARSE = true, SUMS_CODES = false;
};
