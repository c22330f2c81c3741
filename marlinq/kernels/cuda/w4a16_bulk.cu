// W4A16 GEMM for small batches on compute capability 9.0 and later: the stream kernel's products behind tensor copies.
//
//   out[m, n] = sum_k x[m, k] * (code[k, n] - zero[g(k), n]) * scale[g(k), n] + bias[n]
//
// Operands and fragments are those of the stream kernel (w4a16_stream.cu). What differs is who copies and who meets whom.
// A block owns 64*WARPS_N columns, 8*BLOCKS_M rows of the batch and a slice of K's chunks; the blocks of a cluster own
// the slices of one tile. One thread of an extra warp fills the ring (feed.cuh). Chunk j of the slice is multiplied by the
// WARPS_N warps of part j % WARPS_K, so a chunk's work begins when its own bytes are there, and after the last bytes
// of a slice there is one chunk's work left, whatever the number of warps:
//
//   chunk     | 0     | 1     | 2     | 3     | 4     |   in the order of arrival
//   part      | 0     | 1     | 2     | 0     | 1     |   with WARPS_K = 3
//
// Sums. Scales, and with one block of batch rows zero points (sums.cuh), come to float accumulators when a group or a chunk
// ends. At the end every warp sends its sums to the blocks that own them (received.cuh), into memory of its own, so that
// nobody waits for a ring to drain.
//
// Compile-time parameters: ELEMENT, WARPS_N, WARPS_K, BLOCKS_M, ROWS, GROUP (0: channelwise), ZEROS, CLUSTER, STAGES,
// WINDOW, MIN_BLOCKS.
#include "element.cuh"
#include "sums.cuh"

constexpr int TILES = WARPS_N;
constexpr int TILE_M = 8 * BLOCKS_M;
#include "feed.cuh"

constexpr int WARPS = WARPS_N * WARPS_K;
constexpr int THREADS = 32 * (WARPS + 1);
constexpr int PARTS = CLUSTER * WARPS_K;
static_assert(STAGES % WARPS_K == 0, "a stage belongs to one part, which then sees all of its phases");

typedef ELEMENT E;
#include "received.cuh"

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

typedef Accumulators<BLOCKS_M> Sums;
typedef GroupSums<E, BLOCKS_M, ZEROS, true> Group;

// B fragments of the k16 rows `row` and `row + 1`, by column block; `slabs` is the chunk's activations.
__device__ __forceinline__ void load_activations(u32 (&x)[BLOCKS_M][2][2], u32 slabs, int row, int lane) {
    const u32 slab = slabs + row / 4 * SLAB_BYTES;
#pragma unroll
    for (int b = 0; b < BLOCKS_M; ++b) {
        const int m = 8 * b + lane % 8, piece = 2 * (row % 4) + Group::piece(lane);
        u32 r[4];
        load_matrix_x4(r, slab + m * 128 + ((piece ^ (m % 8)) * 16));
        x[b][0][0] = r[0], x[b][0][1] = r[1], x[b][1][0] = r[2], x[b][1][1] = r[3];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) __cluster_dims__(CLUSTER, 1, 1)
    w4a16_bulk(const __grid_constant__ ActivationMaps x, const __grid_constant__ WeightMaps maps,
               const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,
               u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
    const int tiles_m = (M + TILE_M - 1) / TILE_M;
    // Most launches have one batch tile, and a division takes longer than a barrier.
    const int column_tile = tiles_m == 1 ? tile : tile / tiles_m;
    const int m0 = (tile - column_tile * tiles_m) * TILE_M, n0 = column_tile * TILE_N;
    const int rows_m = min(TILE_M, M - m0);
    const u32 chunks = (K + CHUNK - 1) / CHUNK;
    const int begin = chunks * rank / CLUSTER, count = (int)(chunks * (rank + 1) / CLUSTER) - begin;

    Ring ring(shared, shared_address(barriers), warp == WARPS);
    const Received received(ring.stages + STAGES * STAGE_BYTES, shared_address(barriers + 2 * STAGES), rank);
    const Feed feed(x, maps, M, m0, n0);
    if (warp == WARPS && elected()) {
        // The first chunk is requested before the other stages have barriers.
        ring.init(0, 1, WARPS_N);
        feed.start(ring, begin, count);
        received.init();
        ring.init(1, STAGES, WARPS_N);
    }
    __syncthreads();
    // Others need to know of the barriers alone, whose initialisation has a fence of its own.
    if (CLUSTER > 1) cluster_arrive_relaxed();

    if (warp == WARPS) {
        if (elected()) {
            // The compiler would compute it for every chunk, from a slow register.
            ring.stages = opaque(ring.stages);
            Window window(ring);
            feed.go_on(ring, window, begin, count, dependent);
            launch_dependents();
        }
        return;
    }

    const int wn = warp % WARPS_N, wk = warp / WARPS_N;
    Sums total;
    total.clear();
    Group group;
    Scales channel_scale, channel_zero;
    if (GROUP == 0) {
        const int column = min(n0 + wn * 64, N - 64);
        channel_scale = load_scales(scales + column, lane);
        if (ZEROS) channel_zero = load_scales(zeros + column, lane);
        group.clear();
        group.begin(channel_scale, channel_zero);
    }
    ring.advance(wk);
    for (int chunk = wk; chunk < count; chunk += WARPS_K) {
        ring.wait_full();
        const u32 activations = ring.address();
        const unsigned char* stage = shared + (activations - shared_address(shared));
        const uint4* my_words = reinterpret_cast<const uint4*>(stage + WEIGHTS_AT + wn * 512) + lane;
#pragma unroll
        for (int i = 0; i < ROWS; i += 2) {
            const u16* its = reinterpret_cast<const u16*>(stage + SCALES_AT + i / GROUP_ROWS * SCALE_BYTES + wn * 128);
            const auto scale = [&] { return load_scales(its, lane); };
            const auto zero = [&] { return ZEROS ? load_scales(its + (ZEROS_AT - SCALES_AT) / 2, lane) : Scales(); };
            if (GROUP != 0 && i % GROUP_ROWS == 0) {
                group.clear();
                group.begin(scale(), zero());
            }
            u32 fragments[BLOCKS_M][2][2];
            load_activations(fragments, activations, i, lane);
            group.add(total, my_words[i * (ROW_BYTES / 16)], my_words[(i + 1) * (ROW_BYTES / 16)], fragments);
            if (GROUP != 0 && i % GROUP_ROWS == GROUP_ROWS - 2) group.close(total, scale(), zero());
        }
        __syncwarp();
        if (lane == 0) ring.release();
        ring.advance(WARPS_K);
    }
    if (GROUP == 0) group.close(total, channel_scale, channel_zero);

    // The owners have started and expect what comes.
    if (CLUSTER > 1) cluster_wait();
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
        for (int c = 0; c < BLOCKS_M; ++c) received.send(total.value[q][c], rank * WARPS_K + wk, 4 * wn + q, c, lane);
    received.add_and_store<WARPS>(bias == nullptr ? nullptr : bias + n0, out + m0 * out_stride + n0, out_stride, rows_m,
                                  N - n0, dependent, warp, lane);
}
