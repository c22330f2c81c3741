// W4A16 GEMM for small batches on compute capability 9.0 and later: the stream kernel's products behind bulk copies.
//
//   out[m, n] = sum_k x[m, k] * (code[k, n] - zero[g(k), n]) * scale[g(k), n] + bias[n]
//
// Operands, fragments and the split of K are those of the stream kernel (w4a16_stream.cu). What differs is who copies:
// one extra warp moves whole weight rows and scale rows by 1-D bulk copies and activations by a swizzled tensor copy,
// and hands stages over by two barriers. The multiplying warps issue no copies, compute no addresses and never wait for
// each other, so they drift apart and keep different pipes busy.
//
// `dependent`: 0 for an ordinary launch, else one more than the steps past the ring whose weights are brought to L2
// before the wait for the previous kernel.
//
// Compile-time parameters: as the stream kernel's, without ROWS and SCALE_SUMS (chunks have 8 rows, sums are scaled).
#include "element.cuh"
#include "hopper.cuh"
#include "reduction.cuh"
#include "sums.cuh"

constexpr int ROWS = 8;            // k16 rows of weights in a chunk
constexpr int CHUNK = 16 * ROWS;   // channels in a chunk
constexpr int SLABS = CHUNK / 64;  // 128-byte rows of activations
constexpr int TILE_M = 8 * BLOCKS_M;
constexpr int TILE_N = 64 * WARPS_N;
constexpr int WARPS = WARPS_N * WARPS_K;
constexpr int THREADS = 32 * (WARPS + 1);
constexpr int GROUPS = GROUP == 0 ? 1 : CHUNK / GROUP;
constexpr int GROUP_ROWS = ROWS / GROUPS;
constexpr int KINDS = ZEROS ? 2 : 1;
constexpr int PITCH = TILE_N + 4;

// Bytes of a stage: activations first, whose swizzle wants 1024-byte alignment.
constexpr int SLAB_BYTES = TILE_M * 128;
constexpr int WEIGHTS_AT = WARPS_K * SLABS * SLAB_BYTES;
constexpr int ROW_BYTES = WARPS_N * 512;
constexpr int SCALES_AT = WEIGHTS_AT + WARPS_K * ROWS * ROW_BYTES;
constexpr int SCALE_BYTES = TILE_N * 2;
constexpr int STAGE_BYTES = (SCALES_AT + (GROUP == 0 ? 0 : WARPS_K * GROUPS * KINDS * SCALE_BYTES) + 1023) / 1024 * 1024;

typedef ELEMENT E;

// From the stored order of one tile's 64 columns.
__device__ __forceinline__ Scales load_scales(const u16* tile, int lane) {
    Scales s;
    if (GROUP != 0) {
        const uint4 v = *reinterpret_cast<const uint4*>(tile + 8 * (lane / 4));
        s.pair[0] = v.x, s.pair[1] = v.y, s.pair[2] = v.z, s.pair[3] = v.w;
    } else {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const u16* p = tile + 32 * (q / 2) + 8 * (lane / 8) + 4 * (q % 2) + lane / 4 % 2;
            s.pair[q] = load_u16(p) | load_u16(p + 2) << 16;
        }
    }
    return s;
}

typedef Accumulators<BLOCKS_M, ZEROS != 0> Sums;

// B fragments of two k16 rows, `row` and `row + 1`, for all column blocks; `part` is the activations of the part's chunk.
__device__ __forceinline__ void load_activations(u32 (&x)[2][BLOCKS_M][2], u32 part, int row, int lane) {
    const u32 slab = part + row / 4 * SLAB_BYTES;
    if constexpr (BLOCKS_M == 1) {
        const int m = lane % 8, piece = 2 * (row % 4) + lane / 8;
        u32 r[4];
        load_matrix_x4(r, slab + m * 128 + ((piece ^ m) * 16));
        x[0][0][0] = r[0], x[0][0][1] = r[1], x[1][0][0] = r[2], x[1][0][1] = r[3];
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int b = 0; b < BLOCKS_M; b += 2) {
                const int m = 8 * b + lane % 8 + 8 * (lane / 16), piece = 2 * (row % 4 + i) + (lane / 8) % 2;
                u32 r[4];
                load_matrix_x4(r, slab + m * 128 + ((piece ^ (m % 8)) * 16));
                x[i][b][0] = r[0], x[i][b][1] = r[1], x[i][b + 1][0] = r[2], x[i][b + 1][1] = r[3];
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) __cluster_dims__(CLUSTER, 1, 1)
    w4a16_bulk(const __grid_constant__ TensorMap x_map, const unsigned char* __restrict__ words,
               const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,
               u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 rank = blockIdx.x % CLUSTER;
    const int tiles_m = (M + TILE_M - 1) / TILE_M;
    const int tile = blockIdx.x / CLUSTER;
    const int m0 = (tile % tiles_m) * TILE_M, n0 = (tile / tiles_m) * TILE_N;

    constexpr u32 PARTS = CLUSTER * WARPS_K;
    const u32 chunks = (K + CHUNK - 1) / CHUNK;
    const int steps = (chunks + PARTS - 1) / PARTS;
    const auto part_begin = [&](u32 part) { return (int)(chunks * part / PARTS); };

    const u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();

    float* buffer = reinterpret_cast<float*>(shared);
    if (warp == WARPS) {
        const int tiles = min(WARPS_N, N / 64 - n0 / 64), last_group = GROUP == 0 ? 0 : K / GROUP - 1;
        // Lane p of the first WARPS_K looks after part p.
        const int begin = part_begin(rank * WARPS_K + min(lane, WARPS_K - 1));
        const int its_steps = part_begin(rank * WARPS_K + min(lane, WARPS_K - 1) + 1) - begin;
        const auto valid_rows = [&](int chunk) { return min(ROWS, K / 16 - chunk * ROWS); };
        // take(offset in a stage, source, bytes) for this lane's share of a step's weights and scales.
        const auto each_copy = [&](int step, auto take) {
            constexpr int COPIES = ROWS + (GROUP == 0 ? 0 : GROUPS * KINDS);
            for (int index = lane; index < WARPS_K * COPIES; index += 32) {
                const int p = index / COPIES, i = index % COPIES;
                const int chunk = part_begin(rank * WARPS_K + p) + step;
                if (chunk >= part_begin(rank * WARPS_K + p + 1)) continue;
                if (i >= ROWS) {
                    const int which = i - ROWS, g = min(chunk * GROUPS + which / KINDS, last_group);
                    take(SCALES_AT + (p * GROUPS * KINDS + which) * SCALE_BYTES,
                         (which % KINDS == 0 ? scales : zeros) + (i64)g * N + n0, tiles * 128);
                } else if (i < valid_rows(chunk)) {
                    take(WEIGHTS_AT + (p * ROWS + i) * ROW_BYTES,
                         words + ((i64)(chunk * ROWS + i) * N * 2 + n0 * 2) * 4, tiles * 512);
                }
            }
        };
        const auto copy_weights = [&](int step, u32 stage, u32 barrier) {
            u32 bytes = 0;
            if (lane < WARPS_K && step < its_steps) {
                bytes = SLABS * SLAB_BYTES + valid_rows(begin + step) * tiles * 512;
                if (GROUP != 0) bytes += GROUPS * KINDS * tiles * 128;
            }
            bytes = __reduce_add_sync(0xffffffffu, bytes);
            if (lane == 0) barrier_expect(barrier, bytes);
            __syncwarp();
            each_copy(step, [&](u32 offset, const void* source, u32 size) {
                copy_bulk(stage + offset, source, size, barrier);
            });
        };
        const auto copy_activations = [&](int step, u32 stage, u32 barrier) {
            if (lane < WARPS_K && step < its_steps)
                for (int slab = 0; slab < SLABS; ++slab)
                    copy_box(stage + (lane * SLABS + slab) * SLAB_BYTES, &x_map, (begin + step) * CHUNK + slab * 64, m0,
                             barrier);
        };
        const int ahead = dependent ? min(STAGES, steps) : 0;
        for (int s = 0; s < ahead; ++s) copy_weights(s, ring + s * STAGE_BYTES, full + 8 * s);
        if (dependent) {
            // What comes after the ring waits in L2.
            for (int step = ahead; step < min(steps, ahead + dependent - 1); ++step)
                each_copy(step, [&](u32, const void* source, u32 size) { prefetch_bulk(source, size); });
            wait_for_previous_kernel();
        }
        for (int s = 0; s < ahead; ++s) copy_activations(s, ring + s * STAGE_BYTES, full + 8 * s);
        for (int step = ahead; step < steps; ++step) {
            const int s = step % STAGES;
            if (step >= STAGES) barrier_wait(empty + 8 * s, (step / STAGES - 1) % 2);
            copy_weights(step, ring + s * STAGE_BYTES, full + 8 * s);
            copy_activations(step, ring + s * STAGE_BYTES, full + 8 * s);
        }
        launch_dependents();
        __syncwarp();
    } else {
        const int wn = warp % WARPS_N, wk = warp / WARPS_N;
        const int begin = part_begin(rank * WARPS_K + wk), my_steps = part_begin(rank * WARPS_K + wk + 1) - begin;
        const unsigned char* base = shared + (ring - shared_address(shared));
        const int column = min(n0 + wn * 64, N - 64);

        Sums total, group;
        total.clear();
        group.clear();
        Sums& target = GROUP != 0 ? group : total;
        Scales channel_scale, channel_zero;
        if (GROUP == 0) {
            channel_scale = load_scales(scales + column, lane);
            if (ZEROS) channel_zero = load_scales(zeros + column, lane);
        }
        // A part with a step less than others still lets their last stage pass.
        for (int step = 0; step < steps; ++step) {
            const int s = step % STAGES;
            barrier_wait(full + 8 * s, step / STAGES % 2);
            if (step < my_steps) {
                const unsigned char* stage = base + s * STAGE_BYTES;
                const uint4* my_words =
                    reinterpret_cast<const uint4*>(stage + WEIGHTS_AT + wk * ROWS * ROW_BYTES + wn * 512) + lane;
                const u32 activations = ring + s * STAGE_BYTES + wk * SLABS * SLAB_BYTES;
                u32 fragments[2][BLOCKS_M][2];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const uint4 v = my_words[i * (ROW_BYTES / 16)];
                    if (i % 2 == 0) load_activations(fragments, activations, i, lane);
                    const u32(&b)[BLOCKS_M][2] = fragments[i % 2];
                    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        u32 a[4];
                        E::dequantize(word[q], a);
#pragma unroll
                        for (int c = 0; c < BLOCKS_M; ++c)
                            E::multiply_accumulate(target.value[q][c], a, b[c][0], b[c][1]);
                    }
                    if (ZEROS) {
                        const u32 ones[4] = {E::ONES, E::ONES, E::ONES, E::ONES};
#pragma unroll
                        for (int c = 0; c < BLOCKS_M; ++c)
                            E::multiply_accumulate(target.sum_x[c], ones, b[c][0], b[c][1]);
                    }
                    if (GROUP != 0 && i % GROUP_ROWS == GROUP_ROWS - 1) {
                        const u16* at = reinterpret_cast<const u16*>(
                            stage + SCALES_AT + (wk * GROUPS + i / GROUP_ROWS) * KINDS * SCALE_BYTES + wn * 128);
                        const Scales scale = load_scales(at, lane);
                        Scales zero;
                        if (ZEROS) zero = load_scales(at + SCALE_BYTES / 2, lane);
                        close_group<E>(total, group, scale, zero);
                    }
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * s);
        }
        if (GROUP == 0) {
            group = total;
            total.clear();
            close_group<E>(total, group, channel_scale, channel_zero);
        }

        // When all multiplying warps are here all stages are read; their memory becomes the buffer [part][m][n].
        barrier_sync(1, WARPS * 32);
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int c = 0; c < BLOCKS_M; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int m = 8 * c + 2 * (lane % 4) + i % 2, n = 64 * wn + 16 * q + lane / 4 + 8 * (i / 2);
                    buffer[(wk * TILE_M + m) * PITCH + n] = total.value[q][c][i];
                }
    }
    reduce_and_store<E, TILE_M, TILE_N, PITCH, WARPS_K, CLUSTER, THREADS>(buffer, bias, out, out_stride, m0, n0, M, N, rank);
}
