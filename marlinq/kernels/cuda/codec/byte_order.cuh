// The order of codes of 8 bits in a lane's two words of a 16 x 16 block. With k the channels 2 (l%4) + {0, 1} of lane l and n its
// row l / 4:
//
//   word 0    bytes 0, 2: row n, channels k        bytes 1, 3: row n, channels k + 8
//   word 1    the same of row n + 8
//
// So a register of operand A comes from the even or the odd bytes of a word:
//
//   a[0] word 0, even    a[1] word 1, even    a[2] word 0, odd    a[3] word 1, odd
#pragma once
#include "codec/lane_words.cuh"

struct ByteOrder {
    static constexpr int BITS = 8, ROW_CHANNELS = 16, PLANES = 2, LANE_BYTES = 16, BLOCK_WORDS = 2, TILE_BYTES = 1024;
    static constexpr bool SPARSE = false, SUMS_CODES = false, FUSES = false, NORMALIZES = false;
};
