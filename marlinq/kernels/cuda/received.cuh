// The end of the kernels built on tensor copies where K is split: every warp sends its sums to the block that owns them.
//
// A block of the cluster owns every CLUSTER-th of the tile's 16-column blocks (block b: rank b % CLUSTER). Its memory for what
// it receives is float4 [part][slot][8 rows of the batch][lane], a slot being a 16-column block, and counted by a barrier,
// so that nobody reads what another block holds. The owner adds the parts, always in the same order, and stores.
//
// The including file defines TILE_M, TILE_N, PARTS (of K, over all warps of the cluster), CLUSTER and E.
#pragma once
#include "hopper.cuh"

constexpr int SLOTS = (TILE_N / 16 + CLUSTER - 1) / CLUSTER;
constexpr int SLOT_BYTES = TILE_M / 8 * 512;
constexpr int RECEIVED_BYTES = PARTS * SLOTS * SLOT_BYTES;

struct Received {
    u32 memory, all_there;  // addresses: of the memory, and of the barrier that counts its bytes
    int rank, slots;        // what this block owns

    __device__ __forceinline__ Received(u32 at, u32 barrier, int its_rank)
        : memory(at),
          all_there(barrier),
          rank(its_rank),
          slots((TILE_N / 16 - its_rank + CLUSTER - 1) / CLUSTER) {}

    // By the thread that initialises the block's barriers.
    __device__ __forceinline__ void init() const {
        barrier_init(all_there, 1);
        if (CLUSTER > 1) barrier_expect(all_there, PARTS * slots * SLOT_BYTES);
    }
    // A warp's sums of eight rows of the batch and 16 columns: element i of a lane is of row 2 (lane % 4) + i % 2 and column
    // lane / 4 + 8 (i / 2).
    __device__ __forceinline__ void send(const float (&v)[4], int part, int column_block, int row_block, int lane) const {
        const u32 at = memory + (part * SLOTS + column_block / CLUSTER) * SLOT_BYTES + row_block * 512 + lane * 16;
        // Without a cluster there are no addresses in it.
        if constexpr (CLUSTER > 1)
            store_cluster_counted(cluster_address(at, column_block % CLUSTER), v,
                                  cluster_address(all_there, column_block % CLUSTER));
        else
            store_shared(at, v);
    }
    // By the WARPS warps of the block that have sent what they have; this is `warp`. `out` and `bias` begin at the tile.
    template <int WARPS>
    __device__ __forceinline__ void add_and_store(const u16* bias, u16* out, i64 out_stride, int rows_m, int columns,
                                                  bool dependent, int warp, int lane) const {
        if (slots == 0) return;
        if constexpr (CLUSTER > 1)
            barrier_wait_cluster(all_there, 0);
        else
            barrier_sync(1, WARPS * 32);
        // A block whose slice is empty has seen nothing yet that waited for the previous kernel, which may still read `out`.
        if (dependent) wait_for_previous_kernel();
        // A few blocks of 8 rows and 16 columns at once, so that their reads overlap.
        constexpr int BLOCKS = TILE_M / 8, ITEMS = SLOTS * BLOCKS, MINE = (ITEMS + WARPS - 1) / WARPS;
        constexpr int AT_ONCE = MINE < 4 ? MINE : 4;
#pragma unroll 1
        for (int from = 0; from < MINE; from += AT_ONCE) {
            float sum[AT_ONCE][4];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = (from + i) * WARPS + warp, slot = item / BLOCKS, c = item % BLOCKS;
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][j] = 0.f;
                if (slot >= slots || 8 * c >= rows_m) continue;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    const uint4 v = load_shared(memory + (p * SLOTS + slot) * SLOT_BYTES + c * 512 + lane * 16);
                    sum[i][0] += __uint_as_float(v.x), sum[i][1] += __uint_as_float(v.y);
                    sum[i][2] += __uint_as_float(v.z), sum[i][3] += __uint_as_float(v.w);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = (from + i) * WARPS + warp, slot = item / BLOCKS, c = item % BLOCKS;
                const int n = 16 * (slot * CLUSTER + rank), m = 8 * c + lane / 4;
                if (slot >= slots || 8 * c >= rows_m || n >= columns) continue;
                u32 pair[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float shift = bias == nullptr ? 0.f : E::widen(load_u16(bias + n + 8 * h + lane / 4));
                    pair[h] = transpose_matrix(E::narrow(sum[i][2 * h] + shift, sum[i][2 * h + 1] + shift));
                }
                // Now of row m, columns 2 (lane % 4) + {0, 1} and 8 more. Neighbours swap one, to have four in a row.
                const bool odd = lane % 2;
                const u32 theirs = __shfl_sync(0xffffffffu, odd ? pair[0] : pair[1], lane ^ 1);
                const uint2 four = odd ? make_uint2(theirs, pair[1]) : make_uint2(pair[0], theirs);
                if (m < rows_m) store_global(out + m * out_stride + n + 8 * odd + lane % 4 / 2 * 4, four);
            }
        }
    }
};
