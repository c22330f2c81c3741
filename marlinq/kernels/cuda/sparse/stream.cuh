// Product with 4-bit 2:4 sparse weights, on the sparse tensor cores (mma.sp) of compute capability 8.0 and up.
//
//   out[m, n] = sum over kept k of x[m, k] * (code[k, n] - 8) * scale[g(k), n] + bias[n]
//
// As in kernels/stream.cuh the weights are operand A, in registers, and the activations operand B. A row of weights is 32
// channels, of which 16 are kept: the kept codes of 32 (K) x 64 (N) are a Marlin tile of 512 bytes, and their places 256 bytes.
// So a weight takes 3 bits, and mma.sp.m16n8k32 twice the channels of mma.m16n8k16.
//
//   lane l, tile (kt, nt), word q:    n = 64 nt + 16 q + l/4 + {0, 8},  kept channels 16 kt + 2 (l%4) + {0, 1, 8, 9}
//   lane l, tile (kt, nt), mask j:    block q = 2 j + l%4/2, descriptors of channels 32 kt + 16 (l%2) .. + 15 of
//                                     n = 64 nt + 16 q + l/4 (low half) and n + 8 (high half), lowest bits first
//
// mma.sp reads the descriptors of a block from two lanes of each four: lanes 0 and 1 (selector 0) or 2 and 3 (selector 1), so a
// register serves two blocks and no lane's is idle.
//
// Division of work. A block owns 64 WARPS_N columns, 8 BLOCKS_M rows of the batch and one slice of K; the blocks of a cluster own the
// slices of one tile. Warp (wn, wk) owns 64 columns and the wk-th part of the slice, a run of chunks of 128 channels. A ring of
// STAGES stages in shared memory is filled by cp.async, a chunk of every warp a stage:
//   words        [warp][row][lane] 16 bytes; a lane reads back what it copied itself
//   masks        [warp][row][lane] 8 bytes, shared by the lanes of a warp
//   activations  [wk][m][channel], shared by the warps of a part, 16-byte pieces swizzled by m
//   scales       [warp][quantisation group][64]
//
// SCALE_SUMS: scales multiply the sums of a quantisation group, else the weights in 16 bits, which takes fewer registers.
// Reduction: parts are added in shared memory, slices through DSMEM, always in the same order.
//
// Configuration: Element, WARPS_N, WARPS_K, BLOCKS_M, QUANT_GROUP (64, 128, or 0: all of K), SCALE_SUMS, CLUSTER, STAGES, and
// SHARED_BYTES, the host's count of dynamic shared memory.
#pragma once
#include "fault_site.cuh"
#include "codec/int4.cuh"
#include "mma/quant_group_sums.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/launch.cuh"
#include "ptx/matrix.cuh"
#include "reduce/dsmem_pull.cuh"
#include "scale/stored_order.cuh"
#include "sparse/multiply.cuh"

template <typename C>
struct SparseStream {
    typedef typename C::Element E;
    typedef Int4<E> Codec;

    static constexpr int WARPS_N = C::WARPS_N, WARPS_K = C::WARPS_K, CLUSTER = C::CLUSTER, BLOCKS_M = C::BLOCKS_M;
    static constexpr int STAGES = C::STAGES, QUANT_GROUP = C::QUANT_GROUP;
    static constexpr bool SCALE_SUMS = C::SCALE_SUMS;

    static constexpr int ROW = 32, ROWS = 4, CHUNK = ROW * ROWS;  // channels of a row, rows and channels of a chunk
    static constexpr int PIECES = CHUNK / 8;                      // 16-byte pieces of a chunk of activations
    static constexpr int TILE_M = 8 * BLOCKS_M, TILE_N = 64 * WARPS_N;
    static constexpr int WARPS = WARPS_N * WARPS_K, THREADS = 32 * WARPS;
    static constexpr int QUANT_GROUPS = QUANT_GROUP == 64 ? 2 : 1;  // of a chunk
    static constexpr int GROUP_ROWS = ROWS / QUANT_GROUPS;
    static_assert(QUANT_GROUP == 0 || QUANT_GROUP == 64 || QUANT_GROUP == 128, "groups end with rows of a chunk");

    static constexpr int WORD_BYTES = ROWS * 512, MASK_BYTES = ROWS * 256;
    static constexpr int ACTIVATION_BYTES = TILE_M * CHUNK * 2, SCALE_BYTES = QUANT_GROUPS * 128;
    static constexpr int MASKS_AT = WARPS * WORD_BYTES, ACTIVATIONS_AT = MASKS_AT + WARPS * MASK_BYTES;
    static constexpr int SCALES_AT = ACTIVATIONS_AT + WARPS_K * ACTIVATION_BYTES;
    static constexpr int STAGE_BYTES = SCALES_AT + WARPS * SCALE_BYTES;
    static constexpr int PITCH = TILE_N + 4;  // floats a row of the reduction buffer; 4 avoids bank conflicts
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES, REDUCTION_BYTES = WARPS_K * TILE_M * PITCH * 4;
    static constexpr int SHARED_BYTES = RING_BYTES > REDUCTION_BYTES ? RING_BYTES : REDUCTION_BYTES;
    static_assert(C::SHARED_BYTES == SHARED_BYTES, "host and kernel count different bytes of shared memory");

    typedef Accumulators<BLOCKS_M> Sums;

    // The scales of the warp's 64 columns from shared memory.
    static __device__ __forceinline__ Scales<4> load_scales(const u16* base, int lane) {
        if constexpr (QUANT_GROUP != 0)
            return load_group_scales(base, lane);
        else
            return load_channel_scales_shared(base, lane);
    }

    // total += scales * sums, after a quantisation group's last row.
    static __device__ __forceinline__ void close(Sums& total, const Sums& sums, const Scales<4>& scales) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float by[2] = {widen_half<E, 0>(scales.pair[q]), widen_half<E, 1>(scales.pair[q])};
#pragma unroll
            for (int b = 0; b < BLOCKS_M; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    total.value[q][b][i] = fmaf(by[i / 2], sums.value[q][b][i], total.value[q][b][i]);
        }
    }

    // Adds the products of one row; `piece` is the first of its four pieces of activations.
    static __device__ __forceinline__ void add_row(Sums& sums, const uint4& words, const uint2& masks, const Scales<4>& scales,
                                                   u32 activations, int piece, int lane) {
        // All four blocks of weights first: they take fewer registers than all activations.
        const u32 of[4] = {words.x, words.y, words.z, words.w};
        u32 a[4][4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            if (SCALE_SUMS)
                Codec::dequantize(of + q, a[q], Codec::offsets());
            else
                Codec::weights(of + q, a[q], Codec::offsets(), scales.pair[q]);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS_M; ++b) {
            const int m = 8 * b + lane % 8;
            u32 x[4];
            load_matrix_x4(x, activations + m * (CHUNK * 2) + (((piece + lane / 8) ^ (m % 8)) * 16));
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const u32 mask = FAULT_SITE(sparse_mask_of_block, q < 2 ? masks.x : masks.y);
                if (q % 2 == 0)
                    multiply_sparse<E, 0>(sums.value[q][b], a[q], x, mask);
                else
                    multiply_sparse<E, FAULT_SITE(sparse_selector, 1)>(sums.value[q][b], a[q], x, mask);
            }
        }
    }

    static __device__ __forceinline__ void run(const u16* __restrict__ x, const uint4* __restrict__ words,
                                               const uint4* __restrict__ masks, const u16* __restrict__ scales,
                                               const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,
                                               i64 x_stride, i64 out_stride, int dependent) {
        extern __shared__ __align__(128) unsigned char shared[];

        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int wn = warp % WARPS_N, wk = warp / WARPS_N;
        const u32 rank = blockIdx.x % CLUSTER;
        const int tiles_m = (M + TILE_M - 1) / TILE_M;
        // Neighbouring blocks share a column tile, so that its weights are read from L2 after the first.
        const int tile = blockIdx.x / CLUSTER, column_tile = tile / tiles_m;
        const int m0 = (tile - column_tile * tiles_m) * TILE_M, n0 = column_tile * TILE_N;
        const int rows_m = min(TILE_M, M - m0);

        constexpr u32 PARTS = CLUSTER * WARPS_K;
        const u32 chunks = (K + CHUNK - 1) / CHUNK, part = rank * WARPS_K + wk;
        const int first = chunks * part / PARTS, my_steps = chunks * (part + 1) / PARTS - first;
        const int steps = (chunks + PARTS - 1) / PARTS;

        // A warp past the last column repeats it; its results are not stored.
        const int n_tile = FAULT_SITE(sparse_columns, min(n0 / 64 + wn, N / 64 - 1));
        const int last_group = QUANT_GROUP == 0 ? 0 : K / QUANT_GROUP - 1;
        const int all_rows = K / ROW;

        const u32 ring = shared_address(shared);
        const auto fetch_weights = [&](int step) {
            if (step >= my_steps) return;
            const u32 stage = ring + step % STAGES * STAGE_BYTES;
            const int row = (first + step) * ROWS;
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if (row + i < all_rows)
                    copy_async_16(stage + warp * WORD_BYTES + i * 512 + lane * 16,
                                  words + ((i64)(row + i) * (N / 64) + n_tile) * 32 + lane, 16u);
#pragma unroll
            for (int i = 0; i < ROWS; i += 2) {
                const int mine = FAULT_SITE(sparse_mask_rows, i + lane / 16);
                if (row + mine < all_rows)
                    copy_async_16(stage + MASKS_AT + warp * MASK_BYTES + mine * 256 + lane % 16 * 16,
                                  masks + ((i64)(row + mine) * (N / 64) + n_tile) * 16 + lane % 16, 16u);
            }
            if (QUANT_GROUP == 0 && step > 0) return;
            const int group = QUANT_GROUP == 0 ? 0 : (first + step) * QUANT_GROUPS + lane / 8;
            if (lane < QUANT_GROUPS * 8)
                copy_async_16((QUANT_GROUP == 0 ? ring : stage) + SCALES_AT + warp * SCALE_BYTES + lane * 16,
                              scales + (i64)FAULT_SITE(sparse_groups, min(group, last_group)) * N + n_tile * 64 + lane % 8 * 8, 16u);
        };
        const u16* my_x = x + (i64)m0 * x_stride + (i64)first * CHUNK;
        const auto fetch_activations = [&](int step) {
            if (step >= my_steps) return;
            const u32 mine = ring + step % STAGES * STAGE_BYTES + ACTIVATIONS_AT + wk * ACTIVATION_BYTES;
            const int k = (first + step) * CHUNK;
#pragma unroll
            for (int base = 0; base < TILE_M * PIECES; base += 32 * WARPS_N) {
                const int index = base + wn * 32 + lane, m = index / PIECES, piece = index % PIECES;
                // Rows past the batch are not loaded: they reach only columns of the product that are not stored. Weights past K
                // are not multiplied, so neither are their activations.
                if (m < rows_m && k + piece * 8 < K)
                    copy_async_16(mine + m * (CHUNK * 2) + ((piece ^ (m % 8)) * 16), my_x + m * x_stride + piece * 8, 16u);
            }
            my_x += CHUNK;
        };

        if (dependent) {
            fetch_weights(0);
            FAULT_SITE(sparse_waits, wait_for_previous_kernel();)
        }
        for (int s = 0; s < STAGES - 1; ++s) {
            if (!dependent || s > 0) fetch_weights(s);
            fetch_activations(s);
            copy_async_commit();
        }

        Sums total, sums;
        total.clear();
        sums.clear();
        Sums& target = SCALE_SUMS ? sums : total;
        Scales<4> scale = {};
        const u16* channel_scales = reinterpret_cast<const u16*>(shared + SCALES_AT + warp * SCALE_BYTES);

        for (int step = 0; step < steps; ++step) {
            copy_async_wait<FAULT_SITE(sparse_copies_waited, STAGES - 2)>();
            // Only a part's warps, side by side, share something: its activations.
            if (WARPS_N == 1)
                FAULT_SITE(sparse_warp_met, __syncwarp();)
            else
                FAULT_SITE(sparse_neighbours_met, barrier_sync(1 + wk, 32 * WARPS_N);)
            fetch_weights(step + STAGES - 1);
            fetch_activations(step + STAGES - 1);
            copy_async_commit();
            if (step == max(0, steps - STAGES)) launch_dependents();
            if (step >= my_steps) continue;

            const u32 stage = step % STAGES * STAGE_BYTES;
            const uint4* my_words = reinterpret_cast<const uint4*>(shared + stage + warp * WORD_BYTES) + lane;
            const uint2* my_masks = reinterpret_cast<const uint2*>(shared + stage + MASKS_AT + warp * MASK_BYTES) + lane;
            const u32 activations = ring + stage + ACTIVATIONS_AT + wk * ACTIVATION_BYTES;
            const int rows = min(ROWS, all_rows - (first + step) * ROWS);
            // Rows of large tiles one after the other: two at once do not fit the registers.
#pragma unroll(BLOCKS_M >= 4 ? 1 : ROWS)
            for (int i = 0; i < ROWS; ++i) {
                // Groups and K are whole pairs of rows.
                if (i >= rows) break;
                if (i % GROUP_ROWS == 0 && (QUANT_GROUP != 0 || step == 0)) {
                    scale = load_scales(channel_scales + (QUANT_GROUP == 0 ? 0 : stage / 2 + i / GROUP_ROWS * 64), lane);
                    if (QUANT_GROUP != 0 && SCALE_SUMS) sums.clear();
                }
                add_row(target, my_words[i * 32], my_masks[i * 32], scale, activations, 4 * i, lane);
                if (QUANT_GROUP != 0 && SCALE_SUMS && i % GROUP_ROWS == GROUP_ROWS - 1) close(total, sums, scale);
            }
        }
        if (QUANT_GROUP == 0 && SCALE_SUMS && my_steps > 0) close(total, sums, scale);

        // The ring is drained; its memory becomes the reduction buffer [part][m][n].
        copy_async_wait<0>();
        FAULT_SITE(sparse_ring_drained, __syncthreads();)
        float* buffer = reinterpret_cast<float*>(shared);
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int c = 0; c < BLOCKS_M; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int m = 8 * c + 2 * (lane % 4) + i % 2, n = 64 * wn + 16 * q + lane / 4 + 8 * (i / 2);
                    buffer[(wk * TILE_M + m) * PITCH + n] = total.value[q][c][i];
                }
        reduce_and_store<E, Activation::NONE, TILE_M, TILE_N, PITCH, WARPS_K, CLUSTER, THREADS>(
            buffer, bias, out, out_stride, m0, n0, M, N, rank, [] { __syncthreads(); });
    }
};

#define INSTANTIATE_W4A16_SPARSE(NAME, CONFIGURATION)                                                                 \
    extern "C" __global__ void __launch_bounds__(SparseStream<CONFIGURATION>::THREADS, 1)                             \
    CLUSTER_OF(CONFIGURATION::CLUSTER)                                                                                \
    NAME(const u16* __restrict__ x, const uint4* __restrict__ words, const uint4* __restrict__ masks,                 \
         const u16* __restrict__ scales, const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K,    \
         i64 x_stride, i64 out_stride, int dependent) {                                                               \
        SparseStream<CONFIGURATION>::run(x, words, masks, scales, bias, out, M, N, K, x_stride, out_stride, dependent); \
    }
