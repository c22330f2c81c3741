// Split-K reduction by pushing: every warp sends its sums to the block of the cluster that owns them (st.async into DSMEM).
//
// A block owns every Cluster-th of the tile's 16-column blocks (block b: rank b % Cluster). It receives them in memory of its
// own, float4 [part][slot][8 rows of the batch][lane], a slot being a 16-column block, counted by an mbarrier. So no block waits
// for a ring to drain, and none reads another's memory. The owner adds the parts, always in the same order, and stores.
#pragma once
#include "fault_site.cuh"
#include "epilogue/rows.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"

template <typename E, int TileM, int TileN, int Parts, int Cluster>
struct PushedSums {
    static constexpr int SLOTS = (TileN / 16 + Cluster - 1) / Cluster;
    static constexpr int SLOT_BYTES = TileM / 8 * 512;
    static constexpr int BYTES = Parts * SLOTS * SLOT_BYTES;

    u32 memory, arrived;  // addresses of the received sums, and of the barrier that counts their bytes
    int rank, slots;      // rank of this block, and number of slots that it owns

    __device__ __forceinline__ PushedSums(u32 at, u32 barrier, int block_rank)
        : memory(at),
          arrived(barrier),
          rank(block_rank),
          slots((TileN / 16 - block_rank + Cluster - 1) / Cluster) {}

    // By the thread that initialises the block's barriers.
    __device__ __forceinline__ void init() const {
        barrier_init(arrived, 1);
        if (Cluster > 1) barrier_expect(arrived, FAULT_SITE(pushed_bytes, Parts * slots * SLOT_BYTES));
    }
    // Sends a warp's sums of eight rows of the batch and 16 columns: element i of a lane is of row 2 (lane % 4) + i % 2 and
    // column lane / 4 + 8 (i / 2).
    __device__ __forceinline__ void send(const float (&v)[4], int part, int column_block, int row_block, int lane) const {
        const u32 at = memory + (part * SLOTS + FAULT_SITE(pushed_slot, column_block / Cluster)) * SLOT_BYTES + row_block * 512 + lane * 16;
        // Cluster addresses exist only with a cluster.
        if constexpr (Cluster > 1)
            store_cluster_counted(cluster_address(at, column_block % Cluster), v,
                                  cluster_address(arrived, column_block % Cluster));
        else
            store_shared(at, v);
    }
    // Requests, after the wait for the previous kernel, the residuals that warp `warp` adds to its first sums of the tile at m0, n0.
    template <typename RowWork>
    __device__ __forceinline__ typename RowWork::Addend request(const RowWork& work, int m0, int n0, int M, int N, int warp,
                                                                int lane) const {
        typename RowWork::Addend addend = {};
        if constexpr (RowWork::ADDS) {
            const int slot = warp / (TileM / 8), m = m0 + 8 * (warp % (TileM / 8)), n = n0 + 16 * (FAULT_SITE(requested_columns, slot * Cluster + rank));
            if (slot < slots && m < M && n < N) addend = work.request(m, n, M, lane);
        }
        return addend;
    }
    // By the `Warps` warps of the block that send; this is number `warp`. `out` and `bias` begin at the tile. `work` is what is
    // done with whole rows (epilogue/rows.cuh) of the tile at m0, n0, whose factors are there; `first` has been requested.
    template <int Warps, typename RowWork = PlainRows>
    __device__ __forceinline__ void add_and_store(const u16* bias, u16* out, i64 out_stride, int rows_m, int columns,
                                                  bool dependent, int warp, int lane, const RowWork& work = RowWork(),
                                                  int m0 = 0, int n0 = 0,
                                                  const typename RowWork::Addend& first = {}) const {
        if (slots == 0) return;
        if constexpr (Cluster > 1)
            FAULT_SITE(pushed_sums_arrived, barrier_wait_cluster(arrived, 0);)
        else
            FAULT_SITE(pushed_sums_met, barrier_sync(1, Warps * 32);)
        // The previous kernel may still read `out`, and a block with an empty slice has not waited for it yet.
        if (dependent) wait_for_previous_kernel();
        // A few blocks of 8 rows and 16 columns at once, so that their reads overlap.
        constexpr int BLOCKS = TileM / 8, ITEMS = SLOTS * BLOCKS, MINE = (ITEMS + Warps - 1) / Warps;
        constexpr int AT_ONCE = MINE < 4 ? MINE : 4;
#pragma unroll 1
        for (int from = 0; from < MINE; from += AT_ONCE) {
            float sum[AT_ONCE][4];
            typename RowWork::Addend addend[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = (from + i) * Warps + warp, slot = item / BLOCKS, c = item % BLOCKS;
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][j] = 0.f;
                if (slot >= slots || 8 * c >= rows_m) continue;
                if constexpr (RowWork::ADDS) {
                    const int n = 16 * (slot * Cluster + rank);
                    if (from + i == 0)
                        addend[i] = first;
                    else if (n < columns)
                        addend[i] = work.request(m0 + 8 * c, n0 + n, m0 + rows_m, lane);
                }
#pragma unroll
                for (int p = 0; p < Parts; ++p) {
                    const uint4 v = load_shared(memory + (p * SLOTS + slot) * SLOT_BYTES + c * 512 + lane * 16);
                    sum[i][0] += __uint_as_float(v.x), sum[i][1] += __uint_as_float(v.y);
                    sum[i][2] += __uint_as_float(v.z), sum[i][3] += __uint_as_float(v.w);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = (from + i) * Warps + warp, slot = item / BLOCKS, c = item % BLOCKS;
                const int n = 16 * (slot * Cluster + rank), m = 8 * c + lane / 4;
                if (FAULT_SITE(pushed_columns, slot >= slots || 8 * c >= rows_m || n >= columns)) continue;
                work.scale(sum[i], c, lane);
                u32 pair[2], kept[2];
                float squares[2] = {0.f, 0.f};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float shift = bias == nullptr ? 0.f : E::widen(load_u16(bias + n + 8 * h + lane / 4));
                    float low = sum[i][2 * h] + shift, high = sum[i][2 * h + 1] + shift;
                    if constexpr (RowWork::ADDS)
                        kept[h] = transpose_matrix(work.template add<E>(low, high, addend[i], h, squares));
                    pair[h] = FAULT_SITE(pushed_transposed, transpose_matrix(E::narrow(low, high)));
                }
                // Now of row m, columns 2 (lane % 4) + {0, 1} and 8 more. Neighbours swap one, to have four in a row.
                const bool odd = lane % 2;
                const auto store_row = [&](const u32 (&halves)[2], u16* to) {
                    const u32 theirs = __shfl_sync(0xffffffffu, odd ? halves[0] : halves[1], lane ^ 1);
                    const uint2 four = odd ? make_uint2(theirs, halves[1]) : make_uint2(halves[0], theirs);
                    FAULT_SITE(pushed_rows, if (m < rows_m)) store_global(to + n + 8 * odd + lane % 4 / 2 * 4, four);
                };
                store_row(pair, out + m * out_stride);
                if constexpr (RowWork::ADDS) {
                    store_row(kept, work.given.stored + (m0 + m) * work.given.residual_stride + n0);
                    work.store_squares(squares, m0 + 8 * c, n0 + n, m0 + rows_m, lane);
                }
            }
        }
    }
};
