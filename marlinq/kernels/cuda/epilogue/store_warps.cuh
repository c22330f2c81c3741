// The epilogue of blocks that take several tiles: the warps that multiply leave transposed results in shared memory
// (epilogue/transposed_store.cuh), and two warps of the producer's warpgroup store them during the next tile.
#pragma once
#include "ptx/memory.cuh"

// All rows of a warpgroup's columns.
template <int Columns, int TileM>
struct StoreWarps {
    static constexpr int WARPS = 2;
    static constexpr int PITCH = 2 * Columns + 16;  // bytes from row to row, with a pad against bank conflicts
    static constexpr int BYTES = TileM * PITCH;

    // Stores `columns` columns of `rows` rows at `out`; this is warp number `index`.
    static __device__ __forceinline__ void store(u32 from, u16* out, i64 out_stride, int rows, int columns, int index,
                                                 int lane) {
        constexpr int PIECES = Columns / 8, ROWS_AT_ONCE = 32 * WARPS / PIECES, AT_ONCE = 2;
        const int thread = 32 * index + lane, row = thread / PIECES, piece = thread % PIECES;
        if (piece * 8 >= columns) return;
        u32 at = from + row * PITCH + piece * 16;
        u16* to = out + row * out_stride + piece * 8;
#pragma unroll 1
        for (int first = row; first < rows; first += AT_ONCE * ROWS_AT_ONCE) {
            uint4 values[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, at += ROWS_AT_ONCE * PITCH)
                if (first + i * ROWS_AT_ONCE < rows) values[i] = load_shared(at);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, to += ROWS_AT_ONCE * out_stride)
                if (first + i * ROWS_AT_ONCE < rows) store_global(to, values[i]);
        }
    }
};
