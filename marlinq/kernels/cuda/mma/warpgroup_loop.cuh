// The main loop of a warpgroup that multiplies: stored words to fragments in registers (operand A of wgmma), times a tile of
// activations in shared memory (operand B).
//
//   K rows of a chunk     | 0 | 1 | ... | 7 | 0 of the part's next chunk
//   registers             dequantise row i + 1 ...   while the tensor cores multiply row i
//
// So the words of row i + 2 are loaded, those of row i + 1 dequantised and row i multiplied at the same time, across chunk ends
// too. A stage is released when the first products of the next chunk have been issued and all of its own are done.
//
// The tensor cores read places of sparse weights from registers, which are loaded again only when the row's products are done.
// Chunks of four rows have registers for four, loaded with the words; chunks of two have registers for two, loaded behind the wait.
#pragma once
#include "fault_site.cuh"
#include "codec/lane_words.cuh"
#include "mma/warpgroup_sums.cuh"
#include "ptx/matrix.cuh"
#include "ptx/wgmma.cuh"
#include "scale/scaling.cuh"
#include "tma/ring.cuh"

// d += A (registers) * B (shared memory), or d = A * B without ADD, for the element's type.
template <int COLUMNS, bool ADD>
__device__ __forceinline__ void multiply_warpgroup(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, Half) {
    FAULT_SITE(warps_multiply, matrix_multiply_half<COLUMNS, ADD>(d, a, b);)
}
template <int COLUMNS, bool ADD>
__device__ __forceinline__ void multiply_warpgroup(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, Bfloat16) {
    matrix_multiply_bfloat16<COLUMNS, ADD>(d, a, b);
}
// The same with a sparse A, whose places lanes 2 SELECTOR and 2 SELECTOR + 1 of every four hold.
template <int COLUMNS, bool ADD, int SELECTOR>
__device__ __forceinline__ void multiply_warpgroup_sparse(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, const u32& places, Half) {
    matrix_multiply_sparse_half<COLUMNS, ADD, SELECTOR>(d, a, b, places);
}
template <int COLUMNS, bool ADD, int SELECTOR>
__device__ __forceinline__ void multiply_warpgroup_sparse(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, const u32& places, Bfloat16) {
    matrix_multiply_sparse_bfloat16<COLUMNS, ADD, SELECTOR>(d, a, b, places);
}

// N scales or zero points of a lane, a pair each, side by side in shared memory.
template <int N>
__device__ __forceinline__ void load_pairs(u32 (&pairs)[N], const unsigned char* at) {
    if constexpr (N == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(at);
        pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
    } else if constexpr (N == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(at);
        pairs[0] = v.x, pairs[1] = v.y;
    } else {
        pairs[0] = *reinterpret_cast<const u32*>(at);
    }
}

template <typename Shape>
struct WarpgroupLoop {
    typedef typename Shape::Codec Codec;
    typedef typename Shape::E E;
    typedef typename Shape::Layout Layout;
    static constexpr int PRODUCTS = Shape::PRODUCTS, TILE_M = Shape::TILE_M, ROWS = Shape::ROWS, PARTS_K = Shape::PARTS_K;
    static constexpr int QUANT_GROUP = Shape::QUANT_GROUP, QUANT_GROUP_ROWS = Layout::QUANT_GROUP_ROWS;
    static constexpr bool ZEROS = Shape::ZEROS, SCALED_GROUPS = Shape::SCALED_GROUPS, NORMALIZED = Shape::NORMALIZED;
    static constexpr Scaling SCALING = Shape::SCALING;
    // Rows between the loads of a quantisation group's scales and their first use. FUSED computes factors at once, so that the
    // registers are free unless the next row begins another group; otherwise they are read until the previous group has ended.
    static constexpr int SCALES_AHEAD = FAULT_SITE(scales_ahead, SCALING == Scaling::FUSED && QUANT_GROUP_ROWS > 1 ? 2 : 1);

    static constexpr int PLACE_ROWS = ROWS < 4 ? 2 : 4;  // rows of places in registers
    static_assert(ROWS % PLACE_ROWS == 0, "a row has the same registers in every chunk");

    typedef float Sums[PRODUCTS][TILE_M / 2];
    typedef LaneWords<Codec, PRODUCTS> Words;

    Ring<Layout> ring;
    const unsigned char* shared;
    // Offsets from `shared` of this lane's words, places and scales in the first stage.
    int words_at, places_at, scales_at;
    int part, word, lane;

    // `tile` is the 64-column tile of the block that this warp's columns are in, `first_word` the first of its words there.
    __device__ __forceinline__ WarpgroupLoop(const Ring<Layout>& block_ring, const unsigned char* memory, int block_part,
                                             int tile, int first_word, int warp_lane)
        : ring(block_ring), shared(memory), part(block_part), word(first_word), lane(warp_lane) {
        const int ring_at = ring.stages - shared_address(memory);
        // Opaque: otherwise the compiler computes the addresses anew for every chunk.
        const int tile_at = ring_at + Layout::WEIGHTS_AT + tile * Codec::TILE_BYTES;
        words_at = opaque(tile_at + Words::words_offset(word, lane));
        places_at = Codec::SPARSE ? opaque(tile_at + Words::places_offset(word, lane)) : 0;
        scales_at = opaque(ring_at + Layout::SCALES_AT + tile * 128 + lane / 4 * 16 + word * 4);
        ring.advance(part);
    }

    // Row i's product q. A lone block of 16 columns has its places in lanes 0 and 1 of every four (codec/lane_words.cuh).
    template <bool BEGINS_GROUPS>
    static __device__ __forceinline__ void multiply_sparse_block(float (&sums)[TILE_M / 2], const u32 (&a)[4], u64 b,
                                                                 const u32& places, int q, int i) {
        if (BEGINS_GROUPS && i == 0) {
            if (q % 2 == 0)
                multiply_warpgroup_sparse<TILE_M, false, 0>(sums, a, b, places, E());
            else
                multiply_warpgroup_sparse<TILE_M, false, 1>(sums, a, b, places, E());
        } else {
            if (q % 2 == 0)
                multiply_warpgroup_sparse<TILE_M, true, 0>(sums, a, b, places, E());
            else
                multiply_warpgroup_sparse<TILE_M, true, FAULT_SITE(warpgroup_selector, 1)>(sums, a, b, places, E());
        }
    }

    // Gives a stage back to the producer. One lane arrives for its warp, so the warp's other lanes must have read theirs.
    __device__ __forceinline__ void release(const Ring<Layout>& read) const {
        __syncwarp();
        if (lane == 0) read.release();
    }

    // Computes `sums` of a tile over the part's chunks, of the block's `count`. Scales and zero points per channel, if the weight has
    // such, begin at the warp's 64-column tile. Returns the factors by which the sums must still be multiplied.
    __device__ __forceinline__ PerColumn<PRODUCTS> multiply(Sums& sums, int count, const u16* scales, const u16* zeros) {
        Scales<PRODUCTS> scale, zero, normalizers;
        Factors factors[PRODUCTS];
        Words w[2];  // of even and of odd rows, as are the fragments
        u32 a[2][PRODUCTS][4];
        LanePlaces<Codec::SPARSE, PRODUCTS> places[PLACE_ROWS] = {};
        const auto load_places = [&](int stage, int i) {
            places[FAULT_SITE(row_of_places, i % PLACE_ROWS)].load(shared + (places_at + stage * Layout::BYTES) + i * Layout::ROW_BYTES);
        };
        // Row i of a stage.
        const auto load_row = [&](int stage, int i) {
            w[i % 2].load(shared + (words_at + stage * Layout::BYTES) + i * Layout::ROW_BYTES);
            if (PLACE_ROWS == 4) load_places(stage, i);
        };
        // Stands behind the wait for row i's products.
        const auto keep_places = [&](int i) {
            if constexpr (Codec::SPARSE) {
#pragma unroll
                for (u32 of : places[i % PLACE_ROWS].of) keep_in_register(of, ring.stages);
            }
        };
        // Loads scales and zero points of the quantisation group that begins with row i, if one does.
        const auto load_quant_group = [&](int stage, int i) {
            if (QUANT_GROUP == 0 || i % QUANT_GROUP_ROWS) return;
            const unsigned char* at =
                shared + (scales_at + stage * Layout::BYTES) + i / QUANT_GROUP_ROWS * Layout::SCALE_BYTES;
            if (SCALING != Scaling::SUMS) load_pairs(scale.pair, at);
            if (ZEROS) load_pairs(zero.pair, at + (Layout::ZEROS_AT - Layout::SCALES_AT));
        };
        const auto dequantize_row = [&](int i) {
#pragma unroll
            for (int q = 0; q < PRODUCTS; ++q) {
                u32 (&fragment)[4] = FAULT_SITE(operand_registers, a[i % 2][q]);
                if constexpr (SCALING == Scaling::FUSED) {
                    if (i % QUANT_GROUP_ROWS == 0)
                        factors[q] = Codec::factors(Codec::normalize(scale.pair[q], normalizers.pair[q]));
                    Codec::scaled(w[i % 2].of[q], fragment, factors[q]);
                } else {
                    const auto offsets = ZEROS ? Codec::offsets(zero.pair[q]) : Codec::offsets();
                    if (SCALING == Scaling::WEIGHTS)
                        Codec::weights(w[i % 2].block(q), fragment, offsets, scale.pair[q]);
                    else
                        Codec::dequantize(w[i % 2].block(q), fragment, offsets);
                }
            }
        };
        // Calls `use` for every pair of scales in the stage; those of its first quantisation group are in registers.
        const auto each_scale = [&](int stage, auto use) {
#pragma unroll
            for (int g = 0; g < Layout::QUANT_GROUPS; ++g) {
                Scales<PRODUCTS> s = scale;
                if (g > 0) load_pairs(s.pair, shared + (scales_at + stage * Layout::BYTES) + g * Layout::SCALE_BYTES);
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q) use(s.pair[q], q);
            }
        };

        Sums group_sums;
        Sums& target = SCALED_GROUPS ? group_sums : sums;
#pragma unroll
        for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
            for (int i = 0; i < TILE_M / 2; ++i) sums[q][i] = 0.f;
#pragma unroll
        for (int q = 0; q < PRODUCTS; ++q) {
            if constexpr (Codec::FUSES) normalizers.pair[q] = Codec::LARGEST_NORMALIZERS;
        }
        if (QUANT_GROUP == 0) {
            // Keeps the zeros in separate registers: otherwise the compiler copies a shared zero behind the first products' fence.
            settle(sums);
            scale = load_channel_scales<PRODUCTS>(scales, word, lane);
            if (ZEROS) zero = load_channel_scales<PRODUCTS>(zeros, word, lane);
        }
        // Rows past K have activations of zero (TMA fills them in) and finite weights. The wait for the last products is inside the
        // branch: behind it, where the paths with and without chunks join, the compiler would copy sums before the wait.
        int chunk = part;
        if (!Shape::SPLIT || part < count) do {
            ring.wait_full();
            load_row(ring.stage, 0);
            load_row(ring.stage, 1);
            if (PLACE_ROWS == 2) load_places(ring.stage, 0);
            load_quant_group(ring.stage, 0);
            if constexpr (NORMALIZED) {
                // The first chunk, or one whose scales outgrew their columns' normalizers.
                const Scales<PRODUCTS> before = normalizers;
                each_scale(ring.stage,
                           [&](u32 pair, int q) { normalizers.pair[q] = Codec::normalizers(normalizers.pair[q], pair); });
                if (chunk != part) {
                    PerColumn<PRODUCTS> ratios;
#pragma unroll
                    for (int q = 0; q < PRODUCTS; ++q) {
                        ratios.of[q][0] = Codec::template ratio<0>(normalizers.pair[q], before.pair[q]);
                        ratios.of[q][1] = Codec::template ratio<1>(normalizers.pair[q], before.pair[q]);
                    }
                    FAULT_SITE(sums_rescaled, multiply_by(sums, ratios);)
                }
            }
            dequantize_row(0);
            Ring<Layout> last = ring;
            const int entered = chunk;
            bool fits = true;
            do {
                const Ring<Layout> now = ring;
                const u64 activations = matrix_descriptor(now.address());
                ring.advance(PARTS_K);
                const bool more = chunk + PARTS_K < count;
                if (SCALED_GROUPS) load_pairs(scale.pair, shared + (scales_at + now.stage * Layout::BYTES));
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (i + 2 < ROWS) {
                        load_row(now.stage, i + 2);
                    } else if (more) {
                        if (i + 2 == ROWS) ring.wait_full();
                        load_row(ring.stage, i + 2 - ROWS);
                    }
                    if (i + SCALES_AHEAD < ROWS)
                        load_quant_group(now.stage, i + SCALES_AHEAD);
                    else if (more)
                        load_quant_group(ring.stage, i + SCALES_AHEAD - ROWS);
                    constexpr int SLAB_ROWS = 64 / Codec::ROW_CHANNELS;
                    const u64 b = activations + (i / SLAB_ROWS * Layout::SLAB_BYTES + i % SLAB_ROWS * (128 / SLAB_ROWS)) / 16;
                    FAULT_SITE(product_fence, matrix_fence();)
#pragma unroll
                    for (int q = 0; q < PRODUCTS; ++q) {
                        // A quantisation group's first products don't add to what the registers hold.
                        if constexpr (Codec::SPARSE) {
                            multiply_sparse_block<SCALED_GROUPS>(target[q], a[i % 2][q], b, places[i % PLACE_ROWS].of[q / 2], q, i);
                        } else if (SCALED_GROUPS && i == 0) {
                            FAULT_SITE(group_begins, multiply_warpgroup<TILE_M, false>)(target[q], a[i % 2][q], b, E());
                        } else {
                            multiply_warpgroup<TILE_M, true>(target[q], a[i % 2][q], b, E());
                        }
                    }
                    matrix_commit();
                    // The products of the row before are done, so its registers may be written again.
                    FAULT_SITE(row_done, matrix_wait<1>(); if (!SCALED_GROUPS && i == 0 && chunk != entered) release(last);)
                    keep_places(i + PLACE_ROWS - 1);
                    if (PLACE_ROWS == 2 && (i + 1 < ROWS || more))
                        load_places(i + 1 < ROWS ? now.stage : ring.stage, (i + 1) % ROWS);
                    if constexpr (NORMALIZED) if (i + 1 == ROWS && more) {
                        u32 outgrown = 0;
                        each_scale(ring.stage, [&](u32 pair, int q) {
                            outgrown |= Codec::outgrown(Codec::normalize(pair, normalizers.pair[q]));
                        });
                        FAULT_SITE(scales_fit, fits = !__any_sync(0xffffffffu, outgrown);)
                    }
                    dequantize_row(i + 1);
                }
                last = now;
                if (SCALED_GROUPS) {
                    FAULT_SITE(group_done, matrix_wait<0>(); settle(target); release(now); add_scaled<E>(sums, group_sums, scale);)
                }
                chunk += PARTS_K;
            } while (chunk < count && fits);
            if (!SCALED_GROUPS) {
                matrix_wait<0>();
                settle(sums);
                FAULT_SITE(last_stage_released, release(last);)
            }
        } while (NORMALIZED && chunk < count);
        keep_places(ROWS - 1);
        if (SCALING == Scaling::SUMS && QUANT_GROUP == 0) multiply_by<E>(sums, scale);
        PerColumn<PRODUCTS> units;
        units.set(1.f);
        if constexpr (SCALING == Scaling::FUSED) {
#pragma unroll
            for (int q = 0; q < PRODUCTS; ++q) {
                units.of[q][0] = Codec::template unit<0>(normalizers.pair[q]);
                units.of[q][1] = Codec::template unit<1>(normalizers.pair[q]);
            }
        }
        return units;
    }
};
