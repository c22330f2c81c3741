// Operand A of mma.sp and wgmma.sp: 16 rows of 32 columns, of which it holds two of every four, and their places.
#pragma once

namespace emulation {

// The column of element `kept` (0 .. 15) of a row; -1 where its two places don't ascend, for which the PTX ISA leaves the product
// undefined. `word_of(lane)`: the places that a lane of the warp holds. Lanes 2 S and 2 S + 1 of every four are asked, for columns
// 0 .. 15 and 16 .. 31 of rows lane/4 (low half) and lane/4 + 8 (high half).
template <typename Words>
int sparse_column(unsigned row, unsigned kept, unsigned selector, Words word_of) {
    const unsigned four = kept / 2, lane = 4 * (row % 8) + 2 * selector + four / 4;
    const unsigned both = word_of(lane) >> 16 * (row / 8) >> 4 * (four % 4) & 15, first = both & 3, second = both >> 2;
    if (first >= second) return -1;
    return static_cast<int>(4 * four + (kept % 2 == 0 ? first : second));
}

}  // namespace emulation
