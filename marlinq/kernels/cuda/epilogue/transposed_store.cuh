// The epilogue of whole tiles: a warp turns its accumulators, of which a lane has columns n and n + 8 for pairs of batch rows,
// into rows of 16-bit results in shared memory (stmatrix), from where they are stored 16 bytes a lane.
//
// A turn is ROWS batch rows of a warp's columns. In shared memory each row has a pad against bank conflicts.
#pragma once
#include "fault_site.cuh"
#include "mma/warpgroup_sums.cuh"
#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"

template <typename E, int Products, int TileM>
struct TransposedStore {
    static constexpr int COLUMNS = 16 * Products;  // of a warp
    // stmatrix transposes four 8 x 8 matrices at once, so a single product takes two blocks of eight rows.
    static constexpr int ROW_BLOCKS = Products == 1 ? 2 : 1;
    static constexpr int ROWS = 8 * ROW_BLOCKS, TURNS = TileM / ROWS;
    static constexpr int PITCH = 2 * COLUMNS + 16;      // bytes from row to row
    static constexpr int HALF_BYTES = ROWS * PITCH;     // of a turn
    static constexpr int BYTES = 2 * HALF_BYTES;        // of a warp
    static_assert(TileM % ROWS == 0, "rows are transposed in whole turns");

    typedef float Sums[Products][TileM / 2];

    // What `bias` (null, or of the warp's first column) adds to a lane's columns.
    static __device__ __forceinline__ PerColumn<Products> load_bias(const u16* bias, int lane) {
        PerColumn<Products> shifts;
#pragma unroll
        for (int q = 0; q < Products; ++q)
#pragma unroll
            for (int h = 0; h < 2; ++h) shifts.of[q][h] = bias == nullptr ? 0.f : E::widen(bias[16 * q + 8 * h + lane / 4]);
        return shifts;
    }

    // One turn, times `units` plus `shifts`, in 16 bits to shared memory with `pitch` bytes from row to row.
    static __device__ __forceinline__ void transpose(int turn, const Sums& sums, const PerColumn<Products>& units,
                                                     const PerColumn<Products>& shifts, u32 to, int pitch, int lane) {
        const int row = Products == 1 ? lane / 16 * 8 + lane % 8 : lane % 8;
#pragma unroll
        for (int j = 0; j < Products * ROW_BLOCKS; j += 2) {
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int q = Products == 1 ? 0 : j + i / 2, block = Products == 1 ? 2 * turn + i / 2 : turn;
                const float* sum = sums[q] + 4 * block + 2 * (i % 2);
                const float unit = units.of[q][i % 2], shift = shifts.of[q][i % 2];
                pair[i] = E::narrow(fmaf(sum[0], unit, shift), fmaf(sum[1], unit, shift));
            }
            const int piece = Products == 1 ? lane / 8 % 2 : 2 * j + lane / 8;
            store_matrix_x4_transposed(to + row * pitch + piece * 16, pair);
        }
    }

    // Stores a warp's columns for `rows` rows of `out`, which begins at the tile's first. Turns alternate between the two
    // halves of the warp's memory, so one __syncwarp a turn keeps the next turn off what is still being read. The next turn is
    // transposed before this one's rows are stored, so that their loads from shared memory overlap with it.
    static __device__ __forceinline__ void store(const Sums& sums, const PerColumn<Products>& units,
                                                 const PerColumn<Products>& shifts, u32 scratch, u16* out, i64 out_stride,
                                                 int rows, int lane) {
        const auto half = [&](int turn) { return FAULT_SITE(scratch_halves, scratch + turn % 2 * HALF_BYTES); };
        constexpr int PIECES = COLUMNS / 8;  // of 16 bytes, a row
        constexpr int ROWS_AT_ONCE = 32 / PIECES, LOADS = ROWS / ROWS_AT_ONCE;
        const int row = lane / PIECES, piece = lane % PIECES;
        u16* to = out + row * out_stride + piece * 8;
        transpose(0, sums, units, shifts, half(0), PITCH, lane);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            __syncwarp();
            uint4 values[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                values[i] = load_shared(half(turn) + (row + i * ROWS_AT_ONCE) * PITCH + piece * 16);
            if (turn + 1 < TURNS) transpose(turn + 1, sums, units, shifts, half(turn + 1), PITCH, lane);
#pragma unroll
            for (int i = 0; i < LOADS; ++i, to += ROWS_AT_ONCE * out_stride)
                if (ROWS * turn + i * ROWS_AT_ONCE + row < rows) store_global(to, values[i]);
        }
    }
};
