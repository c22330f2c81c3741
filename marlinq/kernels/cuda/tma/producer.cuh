// The TMA producer: one thread of a block that requests all of its operands, three to five copies a chunk.
//
// Channels and columns outside a tensor arrive as zeros and count as bytes. Boxes of activations end with the batch: TMA's
// zero fill of missing rows was measured slower than loading rows that exist (docs/kernels.md, "Rows beyond the batch").
// Rows of a stage past the batch keep their old contents, and their results are not stored.
#pragma once
#include "fault_site.cuh"
#include "ptx/launch.cuh"
#include "ptx/tensor_copy.cuh"
#include "tma/ring.cuh"
#include "tma/stage_layout.cuh"

// Copies chunks of one column tile and one batch tile.
template <typename Layout>
struct Producer {
    static constexpr int TILE_M = Layout::TILE_M, SLABS = Layout::SLABS, QUANT_GROUP = Layout::QUANT_GROUP;
    typedef typename Layout::Activations Activations;

    const TensorMap* x;
    const Activations& activations;
    const WeightMaps& maps;
    int m0, tile;    // first row of the batch, first 64-column tile
    u32 bytes;       // of a chunk
    int sum_chunks;  // the first chunks of K, which are sums of activations

    __device__ __forceinline__ Producer(const Activations& given, const WeightMaps& weights, int M, int K, int m0, int n0)
        : x(FAULT_SITE(activation_map, m0 > 0 && M - m0 < TILE_M ? &given.rest : &given.tile)),
          activations(given),
          maps(weights),
          m0(m0),
          tile(n0 / 64),
          bytes(Layout::COPIED_BYTES - SLABS * 128 * FAULT_SITE(rows_not_copied, max(TILE_M - (M - m0), 0))),
          sum_chunks(Layout::sum_chunks(K)) {}

    __device__ __forceinline__ static int first_quant_group(int chunk) {
        return QUANT_GROUP == 0 ? 0 : chunk * Layout::CHUNK / (QUANT_GROUP == 0 ? 1 : QUANT_GROUP);
    }

    __device__ __forceinline__ void copy_weights(const Ring<Layout>& ring, int chunk) const {
        const u32 at = ring.address(), barrier = ring.full + 8 * ring.stage;
        if (Layout::SUM_CHANNELS > 0) {
            if (chunk < sum_chunks) return barrier_expect(barrier, bytes - (Layout::COPIED_BYTES - Layout::SUM_CHUNK_BYTES));
            chunk -= sum_chunks;
        }
        barrier_expect(barrier, FAULT_SITE(expected_bytes, bytes));
        copy_box_once(at + Layout::WEIGHTS_AT, &maps.words, 0, tile, chunk * Layout::ROWS, barrier);
        if (QUANT_GROUP != 0) copy_box_once(at + Layout::SCALES_AT, FAULT_SITE(scale_map, &maps.scales), 0, tile, first_quant_group(chunk), barrier);
        if (QUANT_GROUP != 0 && Layout::ZEROS)
            copy_box_once(at + Layout::ZEROS_AT, &maps.zeros, 0, tile, first_quant_group(chunk), barrier);
    }
    __device__ __forceinline__ void copy_activations(const Ring<Layout>& ring, int chunk) const {
        const u32 at = ring.address(), barrier = ring.full + 8 * ring.stage;
        if constexpr (Layout::SUM_CHANNELS > 0) {
            if (chunk < sum_chunks) {
                const bool rest = x == &activations.rest;
                copy_box(at, rest ? &activations.sums.rest : &activations.sums.tile, FAULT_SITE(sums_of_chunk, chunk * 64), m0, barrier);
                if (!Layout::CHUNK_SCALES) copy_box(at + Layout::ROW_SCALES_AT, &activations.scales, m0, 0, barrier);
                return;
            }
            chunk -= sum_chunks;
        }
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            copy_box(FAULT_SITE(activation_slab, at + slab * Layout::SLAB_BYTES), x, chunk * Layout::CHUNK + slab * Layout::SLAB_CHANNELS, m0, barrier);
        if constexpr (Layout::ROW_SCALES)
            copy_box(at + Layout::ROW_SCALES_AT, &activations.scales, FAULT_SITE(rows_of_scales, m0), Layout::CHUNK_SCALES ? chunk : 0, barrier);
    }

    // The weights of chunk `begin`, the first of `count`. They depend on no earlier kernel, and copying them takes the producer
    // alone, so they are requested before the block's first barrier.
    __device__ __forceinline__ void start(const Ring<Layout>& ring, int begin, int count) const {
        if (count > 0) copy_weights(ring, begin);
    }
    // The rest of what `start` began: a dependent launch requests more weights, and only then waits for the previous kernel.
    __device__ __forceinline__ void go_on(Ring<Layout>& ring, Window<Layout>& window, int begin, int count,
                                          bool dependent) const {
        const Ring<Layout> first = ring;
        const int ahead = min(dependent ? Layout::AHEAD : 1, count);
#pragma unroll 1
        for (int i = 0; i < ahead; ++i, ring.advance())
            if (i > 0) copy_weights(ring, begin + i);
        if (dependent) FAULT_SITE(producer_waits, wait_for_previous_kernel();)
        ring = first;
#pragma unroll 1
        for (int i = 0; i < ahead; ++i, ring.advance()) copy_activations(ring, begin + i);
        window.chunks = ahead;
        fill(ring, window, begin + ahead, count - ahead);
    }
    // Chunks begin .. begin + count - 1, each as soon as the window and its stage have room.
    __device__ __forceinline__ void fill(Ring<Layout>& ring, Window<Layout>& window, int begin, int count) const {
#pragma unroll 1
        for (int i = 0; i < count; ++i, ring.advance()) {
            window.admit();
            FAULT_SITE(producer_waits_for_stage, ring.wait_empty();)
            copy_weights(ring, begin + i);
            copy_activations(ring, begin + i);
        }
    }
};
