// Layout of a stage of the ring in shared memory, for the kernels whose operands arrive by TMA.
//
// A stage is one chunk of CHUNK channels, 16 for each of the configuration's ROWS: TILE_M rows of activations, ROWS stored rows of
// weights (a row is the TILES * 64 columns of the codec's ROW_CHANNELS), and the chunk's quantisation groups of scales and zero
// points.
//
//   | activations: [slab of 64 channels][row] 128 bytes | weights: [row] TILES tiles of the codec | scales | zero points |
//
// Scales of whole channels (QUANT_GROUP 0) are not part of a stage. A slab of FP8 activations, of one byte a channel, has 128
// channels; the float scales of its TILE_M rows follow the zero points. K's first chunks are then sums of activations: they have a
// slab, and scales of rows unless each chunk has its own.
#pragma once
#include "tma/operand_maps.cuh"

template <typename C, int TileM, int Tiles, typename Rows = SixteenBits>
struct StageLayout {
    typedef typename Rows::Maps Activations;
    static constexpr int TILE_M = TileM, TILES = Tiles, STAGES = C::STAGES, WINDOW = C::WINDOW;
    static constexpr int QUANT_GROUP = C::QUANT_GROUP;
    static constexpr bool ZEROS = C::ZEROS;

    static constexpr int CHUNK = 16 * C::ROWS, ROWS = CHUNK / C::Codec::ROW_CHANNELS;
    static constexpr int SLAB_CHANNELS = 128 / Rows::BYTES, SLABS = CHUNK / SLAB_CHANNELS;  // 128-byte rows of activations
    static constexpr bool ROW_SCALES = Rows::ROW_SCALES, CHUNK_SCALES = Rows::CHUNK_SCALES;
    static constexpr int SUM_CHANNELS = Rows::SUM_CHANNELS;
    static constexpr int QUANT_GROUPS = QUANT_GROUP == 0 || QUANT_GROUP > CHUNK ? 1 : CHUNK / QUANT_GROUP;  // of a chunk
    static constexpr int QUANT_GROUP_ROWS = ROWS / QUANT_GROUPS;
    static constexpr int TILE_N = 64 * TILES;

    // Bytes. Activations come first: their swizzle wants 1024-byte alignment.
    static constexpr int SLAB_BYTES = TILE_M * 128;
    static constexpr int ROW_BYTES = TILES * C::Codec::TILE_BYTES;
    static constexpr int SCALE_BYTES = TILES * 128;  // of one quantisation group
    static constexpr int WEIGHTS_AT = SLABS * SLAB_BYTES;
    static constexpr int SCALES_AT = WEIGHTS_AT + ROWS * ROW_BYTES;
    static constexpr int ZEROS_AT = SCALES_AT + (QUANT_GROUP == 0 ? 0 : QUANT_GROUPS * SCALE_BYTES);
    static constexpr int ROW_SCALES_AT = ZEROS_AT + (QUANT_GROUP == 0 || !ZEROS ? 0 : QUANT_GROUPS * SCALE_BYTES);
    static constexpr int COPIED_BYTES = ROW_SCALES_AT + (ROW_SCALES ? TILE_M * 4 : 0);
    static constexpr int SUM_CHUNK_BYTES = SLAB_BYTES + (ROW_SCALES && !CHUNK_SCALES ? TILE_M * 4 : 0);
    static constexpr int BYTES = (COPIED_BYTES + 1023) / 1024 * 1024;
    static constexpr int RING_BYTES = STAGES * BYTES;
    // Dynamic shared memory begins anywhere, so the ring takes up to this much more to be aligned.
    static constexpr int ALIGNMENT_BYTES = 1024;

    // Chunks whose weights a dependent launch requests before it waits for the previous kernel. More bytes than these would
    // delay that kernel's own requests (docs/kernels.md, "Dependent launches").
    static constexpr int AHEAD_BYTES = 65536;
    static constexpr int AHEAD = BYTES > AHEAD_BYTES ? 1 : AHEAD_BYTES / BYTES < WINDOW ? AHEAD_BYTES / BYTES : WINDOW;

    static_assert(0 < WINDOW && WINDOW <= STAGES, "every chunk in flight has a stage");
    // Chunks of sums, and all chunks.
    static __device__ __forceinline__ int sum_chunks(int K) {
        if constexpr (SUM_CHANNELS == 0) return 0;
        return (K + SUM_CHANNELS - 1) / (SUM_CHANNELS == 0 ? 1 : SUM_CHANNELS);
    }
    static __device__ __forceinline__ int chunks(int K) { return (K + CHUNK - 1) / CHUNK + sum_chunks(K); }

    static_assert(SLAB_BYTES % 1024 == 0 && CHUNK % SLAB_CHANNELS == 0, "slabs hold whole swizzle atoms");
    static_assert(!ROW_SCALES || (SLABS == 1 && QUANT_GROUP == CHUNK), "a chunk is one slab and one group");
};
