// The main loop of a warpgroup that multiplies 4-bit weights by FP8 activations: stored words to E4M3 in registers (operand A of
// wgmma), times a tile of activations in shared memory (operand B), at twice the rate of 16-bit operands.
//
// A chunk is a quantisation group of 128 channels: a step is 32 of them, and a unit the STEPS steps of UNIT_ROWS rows. All units of a
// chunk have the same operand A. A unit's sums are added to the tile's in float, times the scale of the weight's column and, with
// CHUNK_SCALES, that of the activations' row:
//
//   tensor cores     unit 0                                   | unit 1     | unit 2     | unit 3                        | unit 0 of the next chunk
//   this warpgroup   add unit 3 of the chunk before           | add unit 0 | add unit 1 | add unit 2, load next words   | dequantise before, add unit 3
//
// FP8 products keep some 14 bits of their sums, which is another reason to add every unit up in float.
//
// Codes are 8 too large. So a tile begins with chunks of sums, each of 32 groups: scales of the groups (operand A) times minus 8 times the
// sums of the row's activations over the groups (operand B), in the element's type. Each sum is a pair of elements that add up to it.
#pragma once
#include "fault_site.cuh"
#include "codec/lane_words.cuh"
#include "mma/warpgroup_loop.cuh"
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
    // Rows of a unit. Two units take turns: one is multiplied while the other is added up.
    static constexpr int UNIT_ROWS = TILE_M > 128 ? 64 : TILE_M / 2, UNITS = TILE_M / UNIT_ROWS;
    static_assert(PRODUCTS == 1 && UNITS % 2 == 0, "units take turns");
    typedef float Unit[UNIT_ROWS / 2];
    typedef LaneWords<Codec, PRODUCTS> Words;

    Ring<Layout> ring;
    const unsigned char* shared;
    // Offsets from `shared` of this lane's words, column scales and row scales in the first stage.
    int words_at, scales_at, row_scales_at;
    // Place of the scales of the lane's columns in its tile's.
    int column_at;
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
        column_at = lane / 4 * 8 + first_word * 2;
    }

    // The scales of rows 8 c + 2 (lane % 4) + {0, 1}.
    static __device__ __forceinline__ float2 row_pair(const unsigned char* row_scales, int c) {
        return *reinterpret_cast<const float2*>(row_scales + 32 * c);
    }
    // sums += unit * scale of the column, and of the row if each chunk has its own.
    static __device__ __forceinline__ void add_unit(float* sums, const Unit& unit, float first, float second,
                                                    const unsigned char* row_scales) {
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

    // Gives a stage back to the producer where `wanted`. One lane arrives for its warp, so the warp's other lanes must have read theirs.
    __device__ __forceinline__ void release(const Ring<Layout>& read, bool wanted) const {
        __syncwarp();
        FAULT_SITE(fp8_stage_released, if (lane == 0 && wanted) read.release();)
    }

    // Multiplies a chunk of sums: scales of 32 groups, each for a pair, times the pairs. `column_scales`: of the lane's columns n and n + 8
    // in group `first_group`, N of one group before those of the next. `last`: no chunk follows.
    __device__ __forceinline__ void multiply_sums(Sums& sums, const Ring<Layout>& now, const u16* column_scales, int first_group, int groups,
                                                  int N, bool last) const {
        u32 a[STEPS][4];
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            const int group = first_group + 4 * i + lane % 4;
            const u32 pair = group < groups ? *reinterpret_cast<const u32*>(column_scales + group * N) : 0;
            a[i / 2][i % 2 * 2] = permute_bytes<FAULT_SITE(sums_scales, 0x1010u)>(pair, pair);
            a[i / 2][i % 2 * 2 + 1] = permute_bytes<0x3232u>(pair, pair);
        }
        const u64 b = matrix_descriptor(now.address());
        now.wait_full();
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            Unit unit;
            matrix_fence();
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const u64 at = b + u * (UNIT_ROWS * 128 / 16) + 2 * i;
                if (i == 0)
                    multiply_warpgroup<UNIT_ROWS, false>(unit, a[i], at, E());
                else
                    multiply_warpgroup<UNIT_ROWS, true>(unit, a[i], at, E());
            }
            matrix_commit();
            matrix_wait<0>();
            settle_unit(unit);
#pragma unroll
            for (int i = 0; i < UNIT_ROWS / 2; ++i) sums[0][u * (UNIT_ROWS / 2) + i] += unit[i];
        }
        if (!CHUNK_SCALES && last) multiply_rows(sums, shared + (row_scales_at + now.stage * Layout::BYTES));
        release(now, true);
    }

    // Computes `sums` of a tile over `count` chunks from `begin` on. `scales`: those of groups, from the lane's 64-column tile on. Returns
    // the factors by which the sums must still be multiplied.
    __device__ __forceinline__ PerColumn<PRODUCTS> multiply(Sums& sums, int begin_chunk, int count, const u16* scales, int N, int K) {
#pragma unroll
        for (int i = 0; i < TILE_M / 2; ++i) sums[0][i] = 0.f;
        for (int chunk = begin_chunk, sum_chunks = Layout::sum_chunks(K); chunk < sum_chunks && count > 0; ++chunk, --count) {
            multiply_sums(sums, ring, scales + column_at, chunk * 32, K / 128, N, FAULT_SITE(sums_alone, count == 1));
            ring.advance();
        }
        u32 a[STEPS][4], words[STEPS][2];
        Unit unit[2];
        const auto load_words = [&](int stage) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const unsigned char* at = shared + (words_at + stage * Layout::BYTES) + 2 * i * Layout::ROW_BYTES;
                words[i][0] = *reinterpret_cast<const u32*>(at);
                words[i][1] = *reinterpret_cast<const u32*>(at + Layout::ROW_BYTES);
            }
        };
        const auto dequantize = [&] {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) Codec::e4m3(words[i][0], words[i][1], a[i]);
        };
        const auto begin = [&](u64 activations, int u) {
            FAULT_SITE(fp8_fence, matrix_fence();)
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                // 32 bytes a step, in units of 16.
                const u64 b = activations + u * (UNIT_ROWS * 128 / 16) + FAULT_SITE(fp8_step, 2) * i;
                if (i == 0)
                    matrix_multiply_e4m3<UNIT_ROWS, false>(unit[u % 2], a[i], b);
                else
                    matrix_multiply_e4m3<UNIT_ROWS, true>(unit[u % 2], a[i], b);
            }
            matrix_commit();
        };
        float first = 0.f, second = 0.f;
        const auto add = [&](int u, int stage_at) {
            add_unit(sums[0] + u * (UNIT_ROWS / 2), unit[u % 2], first, second,
                     shared + (row_scales_at + stage_at) + u * (UNIT_ROWS * 4));
        };
#pragma unroll
        for (int i = 0; i < UNIT_ROWS / 2; ++i) unit[1][i] = 0.f;
        if (count > 0) {
            ring.wait_full();
            load_words(ring.stage), dequantize();
        }
        Ring<Layout> before = ring;
        for (int chunk = 0; chunk < count; ++chunk) {
            const Ring<Layout> now = ring;
            const u64 activations = matrix_descriptor(now.address());
            const int stage_at = now.stage * Layout::BYTES;
            ring.advance();
            const bool more = chunk + 1 < count;
            begin(activations, 0);
            // The last unit of the chunk before, which is done: without the wait the compiler inserts one for unit 0.
            matrix_wait<1>();
            settle_unit(unit[1]);
            add(UNITS - 1, before.stage * Layout::BYTES);
            const u32 pair = *reinterpret_cast<const u32*>(shared + (scales_at + stage_at));
            first = widen_half<E, 0>(pair), second = widen_half<E, 1>(pair);
#pragma unroll
            for (int u = 1; u < UNITS; ++u) {
                begin(activations, u);
                matrix_wait<1>();
                settle_unit(unit[(u - 1) % 2]);
                add(u - 1, stage_at);
            }
            if (CHUNK_SCALES) release(before, chunk > 0);
            // Behind the last chunk its own words again: a branch would keep older ones in registers.
            if (more) ring.wait_full();
            load_words(more ? ring.stage : now.stage);
            FAULT_SITE(fp8_step_done, matrix_wait<0>();)
            settle_unit(unit[1]);
            dequantize();
            if (!CHUNK_SCALES) release(now, more);
            before = now;
        }
        if (count > 0) {
            add(UNITS - 1, before.stage * Layout::BYTES);
            if (!CHUNK_SCALES) multiply_rows(sums, shared + (row_scales_at + before.stage * Layout::BYTES));
            release(before, true);
        }
        PerColumn<PRODUCTS> units;
        units.set(Codec::E4M3_UNITS);
        return units;
    }
    static __device__ __forceinline__ void settle_unit(Unit& unit) {
#pragma unroll
        for (int i = 0; i < UNIT_ROWS / 2; ++i) asm volatile("" : "+f"(unit[i])::"memory");
    }
};
