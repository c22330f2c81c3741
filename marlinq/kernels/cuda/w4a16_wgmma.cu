// W4A16 GEMM on the warpgroup matrix unit of compute capability 9.0.
//
//   out[m, n] = sum_k x[m, k] * (code[k, n] - zero[g(k), n]) * scale[g(k), n] + bias[n]
//
// The operands are swapped: 64 rows of dequantised weights, in registers, are operand A of wgmma.m64n<TILE_M>k16, and
// TILE_M rows of activations, in shared memory, are operand B. A 16-byte vector of the Marlin layout is one lane's
// share of a 16 (K) x 64 (N) tile, and each of its four words is that lane's A fragment of a 16x16 block. So with a
// warp a tile, word q of all four warps is one 64x16 operand; the rows of the product are merely permuted:
//
//   WIDE   warp w of a warpgroup owns tile w (256 columns a warpgroup); it feeds four products a k16 row, q = 0..3
//   else   warp w owns words 2 (w % 2) + {0, 1} of tile w / 2 (128 columns a warpgroup); two products a row
//   accumulator i of product q: n = 64 tile + 16 q + l/4 + 8 (i/2 % 2),  m = 8 (i/4) + 2 (l%4) + i%2
//
// Who does what. A block owns one column tile, TILE_M rows of the batch and one slice of K; the blocks of a cluster own
// the slices of one tile. Of its warpgroups the last one's first warp only copies: per stage and part of K, rows of
// weights and scales by 1-D bulk copies (they are contiguous as stored) and activations by a swizzled tensor copy.
// Weights and scales depend on no earlier kernel; in a dependent launch only activations wait for it. The other
// warpgroups, GROUPS_N side by side and PARTS_K parts of K, multiply. A stage is handed over by two barriers.
// Reduction as in the stream kernel: shared memory, then distributed shared memory, in a fixed order.
//
// Compile-time parameters: ELEMENT, TILE_M, WIDE, GROUPS_N, PARTS_K, GROUP (0: channelwise), ZEROS, CLUSTER, STAGES.
#include "element.cuh"
#include "hopper.cuh"
#include "reduction.cuh"

constexpr int ROWS = 8;                                    // k16 rows of weights in a chunk
constexpr int CHUNK = 16 * ROWS;                           // channels in a chunk
constexpr int SLABS = CHUNK / 64;                          // 128-byte rows of activations
constexpr int PRODUCTS = WIDE ? 4 : 2;                     // products of a warpgroup a k16 row
constexpr int TILES = GROUPS_N * (WIDE ? 4 : 2);           // 64-column tiles of a block
constexpr int TILE_N = 64 * TILES;
constexpr int CONSUMERS = GROUPS_N * PARTS_K;              // warpgroups that multiply
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int GROUPS = GROUP == 0 ? 1 : CHUNK / GROUP;     // scale groups in a chunk
constexpr int GROUP_ROWS = ROWS / GROUPS;
constexpr int KINDS = ZEROS ? 2 : 1;
constexpr int PITCH = TILE_N + 4;

// Bytes of a stage: activations first, whose swizzle wants 1024-byte alignment.
constexpr int SLAB_BYTES = TILE_M * 128;
constexpr int WEIGHTS_AT = PARTS_K * SLABS * SLAB_BYTES;
constexpr int ROW_BYTES = TILES * 512;
constexpr int SCALES_AT = WEIGHTS_AT + PARTS_K * ROWS * ROW_BYTES;
constexpr int SCALE_BYTES = TILE_N * 2;
constexpr int STAGE_BYTES = (SCALES_AT + (GROUP == 0 ? 0 : PARTS_K * GROUPS * KINDS * SCALE_BYTES) + 1023) / 1024 * 1024;
static_assert(SLAB_BYTES % 1024 == 0, "slabs hold whole swizzle atoms");

typedef ELEMENT E;

struct Matrix {
    static __device__ __forceinline__ void multiply(float (&d)[TILE_M / 2], const u32 (&a)[4], u64 b, Half) {
        matrix_multiply_half<TILE_M>(d, a, b);
    }
    static __device__ __forceinline__ void multiply(float (&d)[TILE_M / 2], const u32 (&a)[4], u64 b, Bfloat16) {
        matrix_multiply_bfloat16<TILE_M>(d, a, b);
    }
};

struct Scales {
    u32 pair[PRODUCTS];  // for product q: the scales (or zero points) of this lane's rows n and n + 8
};

// From the stored order of one tile's 64 columns; `word` is the first of the lane's words.
__device__ __forceinline__ Scales load_scales(const u16* tile, int word, int lane) {
    Scales s;
    const u32* pairs = reinterpret_cast<const u32*>(tile + 8 * (lane / 4)) + word;
#pragma unroll
    for (int q = 0; q < PRODUCTS; ++q) {
        if (GROUP != 0) {
            s.pair[q] = pairs[q];
        } else {
            const int block = word + q;
            const u16* p = tile + 32 * (block / 2) + 8 * (lane / 8) + 4 * (block % 2) + lane / 4 % 2;
            s.pair[q] = load_u16(p) | load_u16(p + 2) << 16;
        }
    }
    return s;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    w4a16_wgmma(const __grid_constant__ TensorMap x_map, const unsigned char* __restrict__ words,
                const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,
                u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    launch_dependents();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
    const u32 rank = blockIdx.x % CLUSTER;
    const int tiles_m = (M + TILE_M - 1) / TILE_M;
    const int tile = blockIdx.x / CLUSTER;
    const int m0 = (tile % tiles_m) * TILE_M, n0 = (tile / tiles_m) * TILE_N;

    constexpr u32 PARTS = CLUSTER * PARTS_K;
    const u32 chunks = (K + CHUNK - 1) / CHUNK;
    const int steps = (chunks + PARTS - 1) / PARTS;
    const auto part_begin = [&](u32 part) { return (int)(chunks * part / PARTS); };

    const u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();

    float* buffer = reinterpret_cast<float*>(shared);
    if (group == CONSUMERS) {
        if (REGISTERS > 0) registers_shrink<56>();
        if (warp == 0) {
            const int tiles = min(TILES, N / 64 - n0 / 64), last_group = GROUP == 0 ? 0 : K / GROUP - 1;
            const auto valid_rows = [&](int chunk) { return min(ROWS, K / 16 - chunk * ROWS); };
            const auto copy_weights = [&](int step, u32 stage, u32 barrier) {
                u32 bytes = 0;
                for (int p = 0; p < PARTS_K; ++p) {
                    const int chunk = part_begin(rank * PARTS_K + p) + step;
                    if (chunk >= part_begin(rank * PARTS_K + p + 1)) continue;
                    bytes += SLABS * SLAB_BYTES + valid_rows(chunk) * tiles * 512;
                    if (GROUP != 0) bytes += GROUPS * KINDS * tiles * 128;
                }
                if (lane == 0) barrier_expect(barrier, bytes);
                __syncwarp();
                for (int p = 0; p < PARTS_K; ++p) {
                    const int chunk = part_begin(rank * PARTS_K + p) + step;
                    if (chunk >= part_begin(rank * PARTS_K + p + 1)) continue;
                    if (lane < valid_rows(chunk))
                        copy_bulk(stage + WEIGHTS_AT + (p * ROWS + lane) * ROW_BYTES,
                                  words + ((i64)(chunk * ROWS + lane) * N * 2 + n0 * 2) * 4, tiles * 512, barrier);
                    if (GROUP != 0 && lane >= 16 && lane < 16 + GROUPS * KINDS) {
                        const int index = lane - 16, kind = index % KINDS;
                        const int g = min(chunk * GROUPS + index / KINDS, last_group);
                        copy_bulk(stage + SCALES_AT + (p * GROUPS * KINDS + index) * SCALE_BYTES,
                                  (kind == 0 ? scales : zeros) + (i64)g * N + n0, tiles * 128, barrier);
                    }
                }
            };
            const auto copy_activations = [&](int step, u32 stage, u32 barrier) {
                for (int index = lane; index < PARTS_K * SLABS; index += 32) {
                    const int p = index / SLABS, chunk = part_begin(rank * PARTS_K + p) + step;
                    if (chunk < part_begin(rank * PARTS_K + p + 1))
                        copy_box(stage + index * SLAB_BYTES, &x_map, chunk * CHUNK + index % SLABS * 64, m0, barrier);
                }
            };
            const int ahead = min(STAGES, steps);
            if (dependent) {
                for (int s = 0; s < ahead; ++s) copy_weights(s, ring + s * STAGE_BYTES, full + 8 * s);
                wait_for_previous_kernel();
                for (int s = 0; s < ahead; ++s) copy_activations(s, ring + s * STAGE_BYTES, full + 8 * s);
            }
            for (int step = dependent ? ahead : 0; step < steps; ++step) {
                const int s = step % STAGES;
                if (step >= STAGES) barrier_wait(empty + 8 * s, (step / STAGES - 1) % 2);
                copy_weights(step, ring + s * STAGE_BYTES, full + 8 * s);
                copy_activations(step, ring + s * STAGE_BYTES, full + 8 * s);
            }
            // The barriers at the end want whole warps.
            __syncwarp();
        }
    } else {
        if (REGISTERS > 0) registers_grow<REGISTERS == 0 ? 56 : REGISTERS>();
        const int part = group / GROUPS_N, column_group = group % GROUPS_N;
        const int my_tile = WIDE ? column_group * 4 + warp : column_group * 2 + warp / 2;
        const int word = WIDE ? 0 : 2 * (warp % 2);
        const int begin = part_begin(rank * PARTS_K + part), my_steps = part_begin(rank * PARTS_K + part + 1) - begin;
        const unsigned char* base = shared + (ring - shared_address(shared));

        float sums[PRODUCTS][TILE_M / 2];
#pragma unroll
        for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
            for (int i = 0; i < TILE_M / 2; ++i) sums[q][i] = 0.f;

        Scales scale, zero;
        if (GROUP == 0) {
            const int column = min(n0 + my_tile * 64, N - 64);
            scale = load_scales(scales + column, word, lane);
            if (ZEROS) zero = load_scales(zeros + column, word, lane);
        }
        // Rows past K have activations of zero (the copy fills them in) and finite weights, whatever the stage held.
        u32 a[2][PRODUCTS][4];
        for (int step = 0; step < my_steps; ++step) {
            const int s = step % STAGES;
            barrier_wait(full + 8 * s, step / STAGES % 2);
            const unsigned char* stage = base + s * STAGE_BYTES;
            const unsigned char* my_words =
                stage + WEIGHTS_AT + part * ROWS * ROW_BYTES + my_tile * 512 + lane * 16 + word * 4;
            const u32 activations = ring + s * STAGE_BYTES + part * SLABS * SLAB_BYTES;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                u32 w[PRODUCTS];
                if constexpr (WIDE) {
                    const uint4 v = *reinterpret_cast<const uint4*>(my_words + i * ROW_BYTES);
                    w[0] = v.x, w[1] = v.y, w[PRODUCTS - 2] = v.z, w[PRODUCTS - 1] = v.w;
                } else {
                    const uint2 v = *reinterpret_cast<const uint2*>(my_words + i * ROW_BYTES);
                    w[0] = v.x, w[1] = v.y;
                }
                if (GROUP != 0 && i % GROUP_ROWS == 0) {
                    const u16* at = reinterpret_cast<const u16*>(
                        stage + SCALES_AT + (part * GROUPS + i / GROUP_ROWS) * KINDS * SCALE_BYTES + my_tile * 128);
                    scale = load_scales(at, word, lane);
                    if (ZEROS) zero = load_scales(at + SCALE_BYTES / 2, word, lane);
                }
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q) {
                    E::dequantize(w[q], a[i % 2][q]);
                    scale_fragment<E, ZEROS != 0>(a[i % 2][q], scale.pair[q], zero.pair[q]);
                }
                const u64 b = matrix_descriptor(activations + i / 4 * SLAB_BYTES + i % 4 * 32);
                matrix_fence();
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q) Matrix::multiply(sums[q], a[i % 2][q], b, E());
                matrix_commit();
                // The products of the row before are done, so its registers may be written again. None stay in flight
                // over the end of a stage: the assembler then serialises them all (C7515).
                if (i < ROWS - 1) matrix_wait<1>();
            }
            matrix_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * s);
        }

        // When all consumers are here all stages are read; their memory becomes the reduction buffer [part][m][n].
        barrier_sync(1, CONSUMERS * 128);
        const int first = column_group * (WIDE ? 256 : 128) + (WIDE ? warp * 64 : warp / 2 * 64 + warp % 2 * 32);
#pragma unroll
        for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
            for (int i = 0; i < TILE_M / 2; ++i) {
                const int m = 8 * (i / 4) + 2 * (lane % 4) + i % 2, n = first + 16 * q + lane / 4 + 8 * (i / 2 % 2);
                buffer[(part * TILE_M + m) * PITCH + n] = sums[q][i];
            }
    }
    reduce_and_store<E, TILE_M, TILE_N, PITCH, PARTS_K, CLUSTER, THREADS>(buffer, bias, out, out_stride, m0, n0, M, N, rank);
}
