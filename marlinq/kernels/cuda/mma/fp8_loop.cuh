// The main loop of a warpgroup that multiplies 4-bit weights by FP8 activations: stored words to E4M3 in registers (operand A of
// wgmma), times a tile of activations in shared memory (operand B), at twice the rate of 16-bit operands.
//
// A chunk is a quantisation group of 128 channels: a step is 32 of them, and a unit the STEPS steps of one product. A unit's sums
// are added to the tile's in float, times the scale of the weight's column and the scale of the activations' row:
//
//   tensor cores     unit (chunk, 0)             | other warpgroup's | unit (chunk, 1)             | ...
//   this warpgroup   dequantise unit (chunk, 1)  | add (chunk, 0)    | dequantise (chunk + 1, 0)   | add (chunk, 1)
//
// So the two warpgroups of a block take turns on the tensor cores. FP8 products keep some 14 bits of their sums, which is
// another reason to add every unit up in float.
#pragma once
#include "fault_site.cuh"
#include "codec/lane_words.cuh"
#include "mma/warpgroup_sums.cuh"
#include "ptx/wgmma.cuh"
#include "tma/ring.cuh"

template <typename Shape>
struct Fp8Loop {
    typedef typename Shape::Codec Codec;
    typedef typename Shape::E E;
    typedef typename Shape::Layout Layout;
    static constexpr int PRODUCTS = Shape::PRODUCTS, TILE_M = Shape::TILE_M, STEPS = Layout::CHUNK / 32;
    static constexpr bool CHUNK_SCALES = Layout::CHUNK_SCALES;
    static_assert(Shape::QUANT_GROUP == 128 && Layout::CHUNK == 128, "a chunk is a group");
    static_assert(Shape::PARTS == 1 && !Shape::ZEROS && Codec::BITS == 4 && !Codec::SPARSE, "no such loop");

    typedef float Sums[PRODUCTS][TILE_M / 2];
    // Rows of a unit: tiles of more have several units with the same operand A, which is then dequantised once for all.
    static constexpr int UNIT_ROWS = TILE_M > 128 ? 128 : TILE_M, UNITS = TILE_M / UNIT_ROWS;
    static_assert(TILE_M % UNIT_ROWS == 0, "tiles are whole units");
    typedef float Unit[UNIT_ROWS / 2];
    typedef LaneWords<Codec, PRODUCTS> Words;

    Ring<Layout> ring;
    const unsigned char* shared;
    // Offsets from `shared` of this lane's words, column scales and row scales in the first stage.
    int words_at, scales_at, row_scales_at;
    int lane;

    // As WarpgroupLoop; `part` is 0.
    __device__ __forceinline__ Fp8Loop(const Ring<Layout>& block_ring, const unsigned char* memory, int, int tile, int first_word,
                                       int warp_lane)
        : ring(block_ring), shared(memory), lane(warp_lane) {
        const int ring_at = ring.stages - shared_address(memory);
        // Opaque: otherwise the compiler computes the addresses anew for every chunk.
        words_at = (ring_at + Layout::WEIGHTS_AT + tile * Codec::TILE_BYTES + Words::words_offset(first_word, lane));
        scales_at = (ring_at + Layout::SCALES_AT + tile * 128 + lane / 4 * 16 + first_word * 4);
        row_scales_at = (ring_at + Layout::ROW_SCALES_AT + lane % 4 * 8);
    }

    // The scales of rows 8 c + 2 (lane % 4) + {0, 1}.
    static __device__ __forceinline__ float2 row_pair(const unsigned char* row_scales, int c) {
        return *reinterpret_cast<const float2*>(row_scales + 32 * c);
    }
    // sums += unit * scale of the column, and of the row if each chunk has its own. `pair`: scales of columns n and n + 8.
    static __device__ __forceinline__ void add_unit(float* sums, const Unit& unit, u32 pair, const unsigned char* row_scales) {
        const float first = widen_half<E, 0>(pair), second = widen_half<E, 1>(pair);
#pragma unroll
        for (int c = 0; c < UNIT_ROWS / 8; ++c) {
            const float2 row = CHUNK_SCALES ? row_pair(row_scales, c) : make_float2(1.f, 1.f);
            float* sum = sums + 4 * c;
            sum[0] = fmaf(unit[4 * c], row.x * first, sum[0]);
            sum[1] = fmaf(unit[4 * c + 1], row.y * first, sum[1]);
            sum[2] = fmaf(unit[4 * c + 2], row.x * second, sum[2]);
            sum[3] = fmaf(unit[4 * c + 3], row.y * second, sum[3]);
        }
    }
    static __device__ __forceinline__ void multiply_rows(Sums& sums, const unsigned char* row_scales) {
#pragma unroll
        for (int c = 0; c < TILE_M / 8; ++c) {
            const float2 row = row_pair(row_scales, c);
#pragma unroll
            for (int q = 0; q < PRODUCTS; ++q) {
                float* sum = sums[q] + 4 * c;
                sum[0] *= row.x, sum[1] *= row.y, sum[2] *= row.x, sum[3] *= row.y;
            }
        }
    }

    // Computes `sums` of a tile over `count` chunks. Returns the factors by which the sums must still be multiplied.
    __device__ __forceinline__ PerColumn<PRODUCTS> multiply(Sums& sums, int count, const u16*, const u16*) {
        u32 a[STEPS][4];
        Unit unit[1];
        u32 words[STEPS][2];  // of one product
        const auto load_step = [&](int stage, int i, int q) {
            const unsigned char* at = shared + (words_at + stage * Layout::BYTES) + 2 * i * Layout::ROW_BYTES + 4 * q;
            words[i][0] = *reinterpret_cast<const u32*>(at);
            words[i][1] = *reinterpret_cast<const u32*>(at + Layout::ROW_BYTES);
        };
        const auto dequantize_step = [&](int i) { Codec::e4m3(words[i][0], words[i][1], a[i]); };
#pragma unroll
        for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
            for (int i = 0; i < TILE_M / 2; ++i) sums[q][i] = 0.f;
        if (count > 0) {
            ring.wait_full();
#pragma unroll
            for (int i = 0; i < STEPS; ++i) load_step(ring.stage, i, 0), dequantize_step(i);
        }
        for (int chunk = 0; chunk < count; ++chunk) {
            const Ring<Layout> now = ring;
            const u64 activations = matrix_descriptor(now.address());
            const int stage_at = now.stage * Layout::BYTES;
            ring.advance();
            const bool more = chunk + 1 < count;
#pragma unroll
            for (int u = 0; u < PRODUCTS * UNITS; ++u) {
                const int q = u / UNITS, part = u % UNITS;
                FAULT_SITE(fp8_fence, matrix_fence();)
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    // 32 bytes a step, in units of 16.
                    const u64 b = activations + part * (UNIT_ROWS * 128 / 16) + FAULT_SITE(fp8_step, 2) * i;
                    if (i == 0)
                        matrix_multiply_e4m3<UNIT_ROWS, false>(unit[0], a[i], b);
                    else
                        matrix_multiply_e4m3<UNIT_ROWS, true>(unit[0], a[i], b);
                    matrix_commit();
                }
                if (part + 1 == UNITS) {
                    // Behind the very last unit nothing is left to load. The chunk's first operands are loaded again: a branch around
                    // the load would keep older words in registers.
                    const bool ends = q + 1 == PRODUCTS;
                    if (ends && more) ring.wait_full();
                    const int stage = ends && more ? ring.stage : now.stage;
                    // The next operands, each as soon as the product that reads its registers is done.
                    const auto next_step = [&](auto index) {
                        constexpr int I = decltype(index)::value;
                        load_step(stage, I, ends ? 0 : q + 1);
                        FAULT_SITE(fp8_step_done, matrix_wait<STEPS - 1 - I>();)
                        dequantize_step(I);
                    };
                    next_step(Number<0>()), next_step(Number<1>()), next_step(Number<2>()), next_step(Number<3>());
                } else {
                    matrix_wait<0>();
                }
                settle(unit);
                const u32 pair = *reinterpret_cast<const u32*>(shared + (scales_at + stage_at) + 4 * q);
                add_unit(sums[q] + part * (UNIT_ROWS / 2), unit[0], pair,
                         shared + (row_scales_at + stage_at) + part * (UNIT_ROWS * 4));
            }
            if (!CHUNK_SCALES && !more) multiply_rows(sums, shared + (row_scales_at + stage_at));
            __syncwarp();
            FAULT_SITE(fp8_stage_released, if (lane == 0) now.release();)
        }
        PerColumn<PRODUCTS> units;
        units.set(Codec::E4M3_UNITS);
        return units;
    }
};
