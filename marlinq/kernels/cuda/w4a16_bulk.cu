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
// Sums. Scales multiply float accumulators when a group or a chunk ends. At the end every warp sends each 16-column
// block of its sums to the block of the cluster that owns it (block b of the tile: rank b % CLUSTER), into memory of its own
// and counted by a barrier, so that nobody waits for a ring to drain and nobody reads what another block holds.
// The owner adds the parts, always in the same order, and stores. No workspace in global memory.
//
// Compile-time parameters: ELEMENT, WARPS_N, WARPS_K, BLOCKS_M, ROWS, GROUP (0: channelwise), ZEROS, CLUSTER, STAGES,
// MIN_BLOCKS.
#include "element.cuh"
#include "sums.cuh"

constexpr int TILES = WARPS_N;
constexpr int TILE_M = 8 * BLOCKS_M;
#include "feed.cuh"

constexpr int WARPS = WARPS_N * WARPS_K;
constexpr int THREADS = 32 * (WARPS + 1);
constexpr int PARTS = CLUSTER * WARPS_K;
// The owner's memory: float4 [part][slot][block of 8 rows][lane], a slot being a 16-column block.
constexpr int SLOTS = (4 * WARPS_N + CLUSTER - 1) / CLUSTER;
constexpr int SLOT_BYTES = BLOCKS_M * 512;
static_assert(STAGES % WARPS_K == 0, "a stage belongs to one part, which then sees all of its phases");

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

typedef Accumulators<BLOCKS_M> Sums;

// B fragments of two k16 rows, `row` and `row + 1`, for all column blocks; `slabs` is the chunk's activations.
__device__ __forceinline__ void load_activations(u32 (&x)[2][BLOCKS_M][2], u32 slabs, int row, int lane) {
    const u32 slab = slabs + row / 4 * SLAB_BYTES;
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
    w4a16_bulk(const __grid_constant__ TensorMap x_map, const __grid_constant__ WeightMaps maps,
               const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,
               u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
    const int tiles_m = (M + TILE_M - 1) / TILE_M;
    const int m0 = tile % tiles_m * TILE_M, n0 = tile / tiles_m * TILE_N;
    const int rows_m = min(TILE_M, M - m0), blocks_m = (rows_m + 7) / 8;
    const u32 chunks = (K + CHUNK - 1) / CHUNK;
    const int begin = chunks * rank / CLUSTER, count = (int)(chunks * (rank + 1) / CLUSTER) - begin;

    Ring ring(shared, barriers, warp == WARPS);
    const u32 received = ring.stages + STAGES * STAGE_BYTES, all_received = shared_address(barriers + 2 * STAGES);
    const int slots = (4 * WARPS_N - rank + CLUSTER - 1) / CLUSTER;  // what this block owns
    if (threadIdx.x == 0) {
        barrier_init(all_received, 1);
        ring.init(WARPS_N);
        if (CLUSTER > 1) barrier_expect(all_received, PARTS * slots * blocks_m * 512);
    }
    __syncthreads();
    // Others need to know of the barriers alone, whose initialisation has a fence of its own.
    if (CLUSTER > 1) cluster_arrive_relaxed();

    if (warp == WARPS) {
        if (lane == 0) {
            const Feed feed{x_map, maps, m0, n0 / 64};
            const int ahead = dependent ? feed.fill_ahead(ring, begin, count) : 0;
            feed.fill(ring, begin, ahead, count);
            launch_dependents();
        }
        return;
    }

    const int wn = warp % WARPS_N, wk = warp / WARPS_N;
    const int column = min(n0 + wn * 64, N - 64);
    Sums total, group;
    total.clear();
    group.clear();
    Sums& target = GROUP != 0 ? group : total;
    Scales channel_scale, zero;
    if (GROUP == 0) {
        channel_scale = load_scales(scales + column, lane);
        if (ZEROS) zero = load_scales(zeros + column, lane);
    }
    ring.advance(wk);
    for (int chunk = wk; chunk < count; chunk += WARPS_K) {
        ring.wait_full();
        const u32 activations = ring.address();
        const unsigned char* stage = shared + (activations - shared_address(shared));
        const uint4* my_words = reinterpret_cast<const uint4*>(stage + WEIGHTS_AT + wn * 512) + lane;
        u32 fragments[2][BLOCKS_M][2];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const uint4 v = my_words[i * (ROW_BYTES / 16)];
            if (i % 2 == 0) load_activations(fragments, activations, i, lane);
            const u32(&b)[BLOCKS_M][2] = fragments[i % 2];
            const u32 word[4] = {v.x, v.y, v.z, v.w};
            const u16* group_scales =
                reinterpret_cast<const u16*>(stage + SCALES_AT + i / GROUP_ROWS * SCALE_BYTES + wn * 128);
            if (GROUP != 0 && ZEROS && i % GROUP_ROWS == 0)
                zero = load_scales(group_scales + (ZEROS_AT - SCALES_AT) / 2, lane);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                u32 a[4];
                E::dequantize(word[q], a, ZEROS ? E::offsets(zero.pair[q]) : E::offsets());
#pragma unroll
                for (int c = 0; c < BLOCKS_M; ++c) E::multiply_accumulate(target.value[q][c], a, b[c][0], b[c][1]);
            }
            if (GROUP != 0 && i % GROUP_ROWS == GROUP_ROWS - 1) close_group<E>(total, group, load_scales(group_scales, lane));
        }
        __syncwarp();
        if (lane == 0) ring.release();
        ring.advance(WARPS_K);
    }
    if (GROUP == 0) {
        group = total;
        total.clear();
        close_group<E>(total, group, channel_scale);
    }

    // The owners have started and expect what comes.
    if (CLUSTER > 1) cluster_wait();
    const int part = rank * WARPS_K + wk;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int block = 4 * wn + q;
        const u32 at = received + (part * SLOTS + block / CLUSTER) * SLOT_BYTES + lane * 16;
#pragma unroll
        for (int c = 0; c < BLOCKS_M; ++c) {
            if (c >= blocks_m) continue;
            const float(&v)[4] = total.value[q][c];
            // Without a cluster there are no addresses in it.
            if constexpr (CLUSTER > 1)
                store_cluster_counted(cluster_address(at + c * 512, block % CLUSTER), v,
                                      cluster_address(all_received, block % CLUSTER));
            else
                *reinterpret_cast<uint4*>(shared + (at + c * 512 - shared_address(shared))) = make_uint4(
                    __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
        }
    }

    if (slots == 0) return;
    if constexpr (CLUSTER > 1)
        barrier_wait_cluster(all_received, 0);
    else
        barrier_sync(1, WARPS * 32);
    // A block whose slice is empty has seen nothing yet that waited for the previous kernel, which may still read `out`.
    if (dependent) wait_for_previous_kernel();
    for (int item = warp; item < slots * blocks_m; item += WARPS) {
        const int slot = item / blocks_m, c = item % blocks_m;
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
        for (int p = 0; p < PARTS; ++p) {
            const uint4 v = load_shared(received + (p * SLOTS + slot) * SLOT_BYTES + c * 512 + lane * 16);
            sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
            sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
        }
        const int n = n0 + 16 * (slot * CLUSTER + rank), m = 8 * c + lane / 4;
        if (n >= N) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float shift = bias == nullptr ? 0.f : E::widen(load_u16(bias + n + 8 * h + lane / 4));
            const u32 pair = transpose_matrix(E::narrow(sum[2 * h] + shift, sum[2 * h + 1] + shift));
            if (m < rows_m) *reinterpret_cast<u32*>(out + (m0 + m) * out_stride + n + 8 * h + 2 * (lane % 4)) = pair;
        }
    }
}
