// W4A16 GEMM on the warpgroup matrix unit of compute capability 9.0.
//
//   out[m, n] = sum_k x[m, k] * (code[k, n] - zero[g(k), n]) * scale[g(k), n] + bias[n]
//
// The operands are swapped: 64 rows of dequantised weights, in registers, are operand A of wgmma.m64n<TILE_M>k16, and
// TILE_M rows of activations, in shared memory, are operand B. A 16-byte vector of the Marlin layout is one lane's
// share of a 16 (K) x 64 (N) tile, and each of its four words is that lane's A fragment of a 16x16 block. So with a
// warp a tile, word q of all four warps is one 64x16 operand; the rows of the product are merely permuted:
//
//   WORDS = 4   warp w of a warpgroup owns tile w (256 columns a warpgroup); it feeds four products a k16 row, q = 0..3
//   WORDS = 2   warp w owns words 2 (w % 2) + {0, 1} of tile w / 2 (128 columns a warpgroup); two products a row
//   WORDS = 1   warp w owns word w of the only tile (64 columns a warpgroup); one product a row
//   accumulator i of product q: n = 64 tile + 16 q + l/4 + 8 (i/2 % 2),  m = 8 (i/4) + 2 (l%4) + i%2
//
// Who does what. A block owns one column tile, TILE_M rows of the batch and one slice of K's chunks; the blocks of a
// cluster own the slices of one tile. One thread of the last warpgroup fills the ring (feed.cuh). The other warpgroups
// multiply: GROUPS_N side by side share a chunk, and chunk j of the slice belongs to part j % PARTS_K.
//
//   K rows of a chunk     | 0 | 1 | ... | 7 | 0 of the part's next chunk
//   registers             dequantise row i + 1 ...   while the tensor cores multiply row i
//
// SPLIT (more than one part): the sums meet as in the stream kernel, in the memory of the ring and then in distributed
// shared memory, in a fixed order. PUSHED (of small tiles): as in the bulk kernel, every warp sends its sums to
// the blocks that own them (received.cuh), which is sooner done but takes memory of its own. Otherwise the grid is the
// multiprocessors; a block takes tile after tile, its filling thread running ahead into the next one while the others narrow
// their own columns and store them, or leave that to others (APART).
//
// EVEN: as without a split, but the last tiles, one to two a block, are dealt out in chunks (Osama et al., "Stream-K",
// PPoPP 2023). Block b has the run [first(b), first(b + 1)) of their chunks and works it off tile by tile from the end:
//
//   tiles     |     t      |   t + 1    |   t + 2    |       block b:  1. t + 2, whose end it lacks: its sums go to
//   blocks    ... b - 1 |        b         |  b + 1 ...                  memory, for a higher block
//                                                                     2. t + 1   3. t, adding what block b - 1 left
//                                                                     4. its tiles that nobody shares
//
// Whoever has a tile's last chunk stores the tile. A run ends inside one tile at most, so a block leaves sums at most
// once, and before it waits for any itself. Waits are for lower blocks, which start no later than oneself. So a launch
// ends however few of its blocks run at once, and there is hardly anything to wait for. Sums are added in the order of
// falling blocks: a launch of the same shape gives the same bits.
//
// APART: where blocks take several tiles, warps that multiply leave results in shared memory, and two warps of the last warpgroup
// store them while the next tile is multiplied. Who made a block's last tile stores it.
//
// SCALING: FUSED, for zero points of 8: one instruction subtracts and scales (element.cuh, "Scaled codes"). If a chunk's scales
// outgrow their columns' normalizers, the products are waited for, sums and normalizers adapted, and the loop goes on.
// SUMS: scales multiply float accumulators when a group, which is a chunk then, or all of K ends. WEIGHTS: they multiply the
// weights' fragments in 16 bits, more instructions a weight and fewer registers.
//
// Compile-time parameters: ELEMENT, TILE_M, WORDS, GROUPS_N, PARTS_K, ROWS, GROUP (0: channelwise), ZEROS, SCALING,
// CLUSTER, STAGES, WINDOW, MIN_BLOCKS, EVEN, APART, PUSHED, GROWN and SHRUNK (registers of a multiplying and a copying thread; 0: as
// launched).
#include "element.cuh"

constexpr int TILES = GROUPS_N * WORDS;
#include "feed.cuh"

constexpr int PRODUCTS = WORDS;                // products of a warpgroup a k16 row
constexpr int CONSUMERS = GROUPS_N * PARTS_K;  // warpgroups that multiply
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int PARTS = PARTS_K * CLUSTER;
constexpr bool SPLIT = PARTS > 1;
constexpr int PITCH = TILE_N + 4;  // floats a row of the reduction buffer
enum { WEIGHTS, SUMS, FUSED };
constexpr bool SCALED_GROUPS = SCALING == SUMS && GROUP != 0;
constexpr bool FEW_REGISTERS = PRODUCTS * TILE_M * (1 + SCALED_GROUPS) > 256;
// Rows between the loads of a group's scales and their first use; factors are made of them at once, what else is kept of them
// is read until the group before has ended.
constexpr int GROUP_AHEAD = SCALING == FUSED ? 2 : 1;
// Tiles are taken in bands of so many batch tiles, so that what a wave of blocks reads stays in L2.
constexpr int BAND = 1024 / TILE_M;
static_assert(STAGES % PARTS_K == 0, "a stage belongs to one part, which then sees all of its phases");
static_assert(STAGES >= 2 * PARTS_K, "a part begins its next chunk before it gives the last one back");
static_assert(SCALING != SUMS || GROUP == 0 || GROUP == CHUNK, "sums are scaled at chunk ends");
static_assert(SCALING != FUSED || (GROUP != 0 && !ZEROS), "the fused product is of a group's scales and zero points of 8");
static_assert(!PUSHED || CLUSTER > 1, "sums are sent to other blocks");
static_assert(!EVEN || !SPLIT, "chunks are dealt out to blocks that split K in no other way");

// Without a split a warp transposes its results in memory of its own: one or two blocks of eight rows of the batch, twice,
// each row with its columns and a pad against bank conflicts. Four 8 x 8 matrices are transposed at once.
constexpr int WARP_COLUMNS = 16 * PRODUCTS;
constexpr int ROW_BLOCKS = PRODUCTS == 1 ? 2 : 1;
constexpr int NARROW_PITCH = 2 * WARP_COLUMNS + 16;
constexpr int NARROW_BYTES = 2 * 8 * ROW_BLOCKS * NARROW_PITCH;
constexpr int TURN_ROWS = 8 * ROW_BLOCKS, TURNS = TILE_M / TURN_ROWS;
static_assert(TILE_M % TURN_ROWS == 0, "rows are transposed in whole turns");

// APART: all rows of a group's columns, which others store.
constexpr int GROUP_COLUMNS = 64 * WORDS;
constexpr int APART_PITCH = 2 * GROUP_COLUMNS + 16;
constexpr int STORING = 2;  // warps
constexpr int APART_BYTES = APART ? TILE_M * APART_PITCH : 0;
constexpr int SCRATCH_BYTES = APART_BYTES > 4 * NARROW_BYTES ? APART_BYTES : 4 * NARROW_BYTES;  // of a group
static_assert(!APART || !SPLIT, "only whole tiles are stored apart");

typedef ELEMENT E;
constexpr bool NORMALIZED = SCALING == FUSED && E::NORMALIZES;
#include "received.cuh"
#include "reduction.cuh"

template <int VALUE>
struct Number {
    static constexpr int value = VALUE;
};

struct Matrix {
    template <bool ADD>
    static __device__ __forceinline__ void multiply(float (&d)[TILE_M / 2], const u32 (&a)[4], u64 b, Half) {
        matrix_multiply_half<TILE_M, ADD>(d, a, b);
    }
    template <bool ADD>
    static __device__ __forceinline__ void multiply(float (&d)[TILE_M / 2], const u32 (&a)[4], u64 b, Bfloat16) {
        matrix_multiply_bfloat16<TILE_M, ADD>(d, a, b);
    }
};

struct Scales {
    u32 pair[PRODUCTS];  // for product q: the scales (or zero points) of this lane's rows n and n + 8
};

// PRODUCTS words, side by side in shared memory.
__device__ __forceinline__ void load_words(u32 (&words)[PRODUCTS], const unsigned char* at) {
    if constexpr (PRODUCTS == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(at);
        words[0] = v.x, words[1 % PRODUCTS] = v.y, words[2 % PRODUCTS] = v.z, words[3 % PRODUCTS] = v.w;
    } else if constexpr (PRODUCTS == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(at);
        words[0] = v.x, words[1 % PRODUCTS] = v.y;
    } else {
        words[0] = *reinterpret_cast<const u32*>(at);
    }
}

// Scales of all of K, from the stored order of one tile's 64 columns; `word` is the first of the lane's words.
__device__ __forceinline__ Scales load_scales(const u16* tile, int word, int lane) {
    Scales s;
#pragma unroll
    for (int q = 0; q < PRODUCTS; ++q) {
        const int block = word + q;
        const u16* p = tile + 32 * (block / 2) + 8 * (lane / 8) + 4 * (block % 2) + lane / 4 % 2;
        s.pair[q] = load_u16(p) | load_u16(p + 2) << 16;
    }
    return s;
}

// Element i of a product's accumulators belongs to row n, or n + 8, of the lane.
__device__ __forceinline__ float scale_of(const Scales& s, int q, int i) {
    return i / 2 % 2 == 0 ? widen_half<E, 0>(s.pair[q]) : widen_half<E, 1>(s.pair[q]);
}

// After a wait for products: the compiler, which doesn't know that they are asynchronous, reads the sums behind this only.
__device__ __forceinline__ void settle(float (&sums)[PRODUCTS][TILE_M / 2]) {
#pragma unroll
    for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
        for (int i = 0; i < TILE_M / 2; ++i) asm volatile("" : "+f"(sums[q][i])::"memory");
}

__device__ __forceinline__ void add_scaled(float (&sums)[PRODUCTS][TILE_M / 2], const float (&group)[PRODUCTS][TILE_M / 2],
                                           const Scales& s) {
#pragma unroll
    for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
        for (int i = 0; i < TILE_M / 2; ++i) sums[q][i] = fmaf(scale_of(s, q, i), group[q][i], sums[q][i]);
}

__device__ __forceinline__ void multiply_by(float (&sums)[PRODUCTS][TILE_M / 2], const Scales& s) {
#pragma unroll
    for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
        for (int i = 0; i < TILE_M / 2; ++i) sums[q][i] *= scale_of(s, q, i);
}

// A number for each of a lane's columns: of product q, row n and n + 8.
struct PerColumn {
    float of[PRODUCTS][2];

    __device__ __forceinline__ void set(float value) {
#pragma unroll
        for (int q = 0; q < PRODUCTS; ++q) of[q][0] = of[q][1] = value;
    }
};

__device__ __forceinline__ void multiply_by(float (&sums)[PRODUCTS][TILE_M / 2], const PerColumn& factors) {
#pragma unroll
    for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
        for (int i = 0; i < TILE_M / 2; ++i) sums[q][i] *= factors.of[q][i / 2 % 2];
}

// What `bias` (null, or of the warp's first column) adds to a lane's columns.
__device__ __forceinline__ PerColumn load_shifts(const u16* bias, int lane) {
    PerColumn shifts;
#pragma unroll
    for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
        for (int h = 0; h < 2; ++h) shifts.of[q][h] = bias == nullptr ? 0.f : E::widen(bias[16 * q + 8 * h + lane / 4]);
    return shifts;
}

// A warp's columns of TURN_ROWS rows, times `units` plus `shifts`, in 16 bits to shared memory, with `pitch` bytes from row to row.
__device__ __forceinline__ void transpose_turn(int turn, const float (&sums)[PRODUCTS][TILE_M / 2], const PerColumn& units,
                                               const PerColumn& shifts, u32 to, int pitch, int lane) {
    const int row = PRODUCTS == 1 ? lane / 16 * 8 + lane % 8 : lane % 8;
#pragma unroll
    for (int j = 0; j < PRODUCTS * ROW_BLOCKS; j += 2) {
        u32 pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int q = PRODUCTS == 1 ? 0 : j + i / 2, block = PRODUCTS == 1 ? 2 * turn + i / 2 : turn;
            const float* sum = sums[q] + 4 * block + 2 * (i % 2);
            const float unit = units.of[q][i % 2], shift = shifts.of[q][i % 2];
            pair[i] = E::narrow(fmaf(sum[0], unit, shift), fmaf(sum[1], unit, shift));
        }
        const int piece = PRODUCTS == 1 ? lane / 8 % 2 : 2 * j + lane / 8;
        store_matrix_x4_transposed(to + row * pitch + piece * 16, pair);
    }
}

// Stores a warp's columns for `rows` rows of `out` (which begins at the tile's first). The two halves of its memory take turns, so
// that one barrier a turn keeps writers off what is still being read; and the next turn is under way before this one's rows,
// which come back after a while, are stored.
__device__ __forceinline__ void store_columns(const float (&sums)[PRODUCTS][TILE_M / 2], const PerColumn& units,
                                              const PerColumn& shifts, u32 scratch, u16* out, i64 out_stride, int rows,
                                              int lane) {
    const auto half = [&](int turn) { return scratch + turn % 2 * (NARROW_BYTES / 2); };
    constexpr int PIECES = WARP_COLUMNS / 8;  // of 16 bytes, a row
    constexpr int ROWS_AT_ONCE = 32 / PIECES, LOADS = TURN_ROWS / ROWS_AT_ONCE;
    const int row = lane / PIECES, piece = lane % PIECES;
    u16* to = out + row * out_stride + piece * 8;
    transpose_turn(0, sums, units, shifts, half(0), NARROW_PITCH, lane);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        __syncwarp();
        uint4 values[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            values[i] = load_shared(half(turn) + (row + i * ROWS_AT_ONCE) * NARROW_PITCH + piece * 16);
        if (turn + 1 < TURNS) transpose_turn(turn + 1, sums, units, shifts, half(turn + 1), NARROW_PITCH, lane);
#pragma unroll
        for (int i = 0; i < LOADS; ++i, to += ROWS_AT_ONCE * out_stride)
            if (TURN_ROWS * turn + i * ROWS_AT_ONCE + row < rows) store_global(to, values[i]);
    }
}

// A group's columns, `columns` of which exist, out of shared memory, by STORING warps of which this is number `index`.
__device__ __forceinline__ void store_group(u32 from, u16* out, i64 out_stride, int rows, int columns, int index, int lane) {
    constexpr int PIECES = GROUP_COLUMNS / 8, ROWS_AT_ONCE = 32 * STORING / PIECES, AT_ONCE = 2;
    const int thread = 32 * index + lane, row = thread / PIECES, piece = thread % PIECES;
    if (piece * 8 >= columns) return;
    u32 at = from + row * APART_PITCH + piece * 16;
    u16* to = out + row * out_stride + piece * 8;
#pragma unroll 1
    for (int first = row; first < rows; first += AT_ONCE * ROWS_AT_ONCE) {
        uint4 values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, at += ROWS_AT_ONCE * APART_PITCH)
            if (first + i * ROWS_AT_ONCE < rows) values[i] = load_shared(at);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, to += ROWS_AT_ONCE * out_stride)
            if (first + i * ROWS_AT_ONCE < rows) store_global(to, values[i]);
    }
}

// The tiles that a block works on, one after the other, and of each the chunks that are its own.
struct Work {
    int tile, begin, count;  // chunks: the first, how many

    __device__ __forceinline__ Work(int all_tiles, int all_chunks) : tiles(all_tiles), chunks(all_chunks) {
        const int block = blockIdx.x;
        if constexpr (EVEN) {
            const Dealt dealt(*this);
            end_run_at(dealt, dealt.first(block + 1));
        } else {
            const u32 rank = block % CLUSTER;
            tile = block / CLUSTER;
            begin = chunks * rank / CLUSTER;
            count = (int)(chunks * (rank + 1) / CLUSTER) - begin;
        }
    }
    __device__ __forceinline__ bool left() const {
        if constexpr (EVEN) return count > 0;
        return SPLIT ? tile == blockIdx.x / CLUSTER : tile < tiles;
    }
    __device__ __forceinline__ void next() {
        if constexpr (EVEN) {
            const Dealt dealt(*this);
            if (tile >= dealt.tile) {
                const int start = dealt.unit(*this);
                if (start > dealt.first(blockIdx.x)) return end_run_at(dealt, start);
                tile = blockIdx.x - dealt.grid;
            }
            tile += dealt.grid, begin = 0, count = tile < dealt.tile ? chunks : 0;
        } else {
            tile += gridDim.x;
        }
    }
    // Whether higher blocks have the tile's last chunks.
    __device__ __forceinline__ bool lacks_end() const { return begin + count < chunks; }
    // Whether the block has no tile behind this one.
    __device__ __forceinline__ bool last() const {
        Work after = *this;
        after.next();
        return !after.left();
    }
    // Of a tile that lacks its begin: whether `block`, which has chunks of it, has not the first; so has the one below.
    __device__ __forceinline__ bool lacks_begin(int block) const {
        const Dealt dealt(*this);
        return dealt.first(block) > dealt.unit(*this) - begin;
    }

private:
    int tiles, chunks;

    // What is dealt out in chunks: the tiles from `tile` on. Computed where it is needed if registers are short.
    struct Dealt {
        int grid, tile, units, chunks;
        __device__ __forceinline__ explicit Dealt(const Work& work)
            : grid(FEW_REGISTERS ? opaque(gridDim.x) : gridDim.x),
              tile(max(work.tiles / grid - 1, 0) * grid),
              units((work.tiles - tile) * work.chunks),
              chunks(work.chunks) {}
        __device__ __forceinline__ int first(int block) const { return units / grid * block + min(block, units % grid); }
        __device__ __forceinline__ int unit(const Work& work) const { return (work.tile - tile) * chunks + work.begin; }
    };
    // Takes the chunks of the block's run before `end` that are of one tile.
    __device__ __forceinline__ void end_run_at(const Dealt& dealt, int end) {
        tile = (end - 1) / chunks;
        const int start = max(dealt.first(blockIdx.x), tile * chunks);
        begin = start - tile * chunks, count = end - start;
        tile += dealt.tile;
    }
};

// Sums on their way between the same warp of two blocks: vectors of four a lane, those of a warp side by side.
constexpr int VECTORS = PRODUCTS * TILE_M / 8;
constexpr int WARP_SUMS = VECTORS * 128;

__device__ __forceinline__ void leave_sums(const float (&sums)[PRODUCTS][TILE_M / 2], const PerColumn& units, float* warps,
                                           int lane) {
    float* mine = warps + lane * 4;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const float *sum = sums[v / (TILE_M / 8)] + v % (TILE_M / 8) * 4, *unit = units.of[v / (TILE_M / 8)];
        store_global(mine + v * 128, make_uint4(__float_as_uint(sum[0] * unit[0]), __float_as_uint(sum[1] * unit[0]),
                                                __float_as_uint(sum[2] * unit[1]), __float_as_uint(sum[3] * unit[1])));
    }
}

// To its own sums, times `units`.
__device__ __forceinline__ void add_sums(float (&sums)[PRODUCTS][TILE_M / 2], const PerColumn& units, const float* warps,
                                         int lane) {
    const float* mine = opaque(warps + lane * 4);
    // As many at once as there are registers free between two tiles.
    constexpr int AT_ONCE = 16;
#pragma unroll
    for (int from = 0; from < VECTORS; from += AT_ONCE) {
        uint4 loaded[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (from + i < VECTORS) loaded[i] = load_l2(mine + (from + i) * 128);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (from + i < VECTORS) {
                float* sum = sums[(from + i) / (TILE_M / 8)] + (from + i) % (TILE_M / 8) * 4;
                const float* unit = units.of[(from + i) / (TILE_M / 8)];
                sum[0] = fmaf(sum[0], unit[0], __uint_as_float(loaded[i].x));
                sum[1] = fmaf(sum[1], unit[0], __uint_as_float(loaded[i].y));
                sum[2] = fmaf(sum[2], unit[1], __uint_as_float(loaded[i].z));
                sum[3] = fmaf(sum[3], unit[1], __uint_as_float(loaded[i].w));
            }
    }
}

// One thread beside the filling one tells higher blocks that this one's sums lie in memory (flag of the block: 0 before and
// after every launch) and its own warps that those of lower blocks do, so that no multiplying warp waits for memory to
// be ordered or for a flag to arrive. Both happen once at most. Launches of a stream share flags and memory though the next
// one may begin early: it touches flags after the wait for the previous one, and memory after products of activations,
// which come behind the same wait.
__device__ __forceinline__ void carry_messages(Work work, u32* flags, u32 all_left, u32 all_there, bool dependent) {
    if (dependent) wait_for_previous_kernel();
    for (; work.left(); work.next()) {
        if (work.lacks_end()) {
            barrier_wait(all_left, 0);
            store_release(flags + blockIdx.x, 1);
        } else if (work.begin > 0) {
            for (int block = blockIdx.x; work.lacks_begin(block);) {
                u32* flag = flags + --block;
                while (load_acquire(flag) == 0) continue;
                // Nobody else looks at it in this launch.
                store_relaxed(flag, 0);
            }
            barrier_arrive(all_there);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) __cluster_dims__(CLUSTER, 1, 1)
    w4a16_wgmma(const __grid_constant__ ActivationMaps x, const __grid_constant__ WeightMaps maps,
                const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,
                u16* __restrict__ out, int M, int N, int K, i64 out_stride, int dependent, float* partials, u32* flags) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) u64 barriers[2 * STAGES + 2 + 2 * GROUPS_N * APART];

    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
    const int group = uniform(threadIdx.x / 128);
    const int rank = blockIdx.x % CLUSTER;
    const int tiles_m = (M + TILE_M - 1) / TILE_M, tiles_n = (N + TILE_N - 1) / TILE_N;
    struct Place {
        int m0, n0;
    };
    // A division takes longer than a barrier, so tiles are placed with a reciprocal, and most launches have one batch tile.
    const int band_tiles = BAND * tiles_n;
    const float bands_a_tile = 1.f / (float)band_tiles;
    const auto place = [&](int tile) {
        if (tiles_m == 1) return Place{0, tile * TILE_N};
        // Off by one at most: no memory holds the results of 2^24 tiles, of 64 x 64 at least where a batch has several.
        int band = (int)((float)tile * bands_a_tile), rest = tile - band * band_tiles;
        if (rest < 0) --band, rest += band_tiles;
        if (rest >= band_tiles) ++band, rest -= band_tiles;
        const int height = tiles_m - band * BAND;
        if (height >= BAND) return Place{(band * BAND + rest % BAND) * TILE_M, rest / BAND * TILE_N};
        return Place{(band * BAND + rest % height) * TILE_M, rest / height * TILE_N};
    };
    const int chunks = (K + CHUNK - 1) / CHUNK;

    // With few words a lane the compiler would compute the address for every chunk, from a slow register.
    const u32 first_barrier = WORDS == 1 ? opaque(shared_address(barriers)) : shared_address(barriers);
    Ring ring(shared, first_barrier, group == CONSUMERS);
    const u32 extra_barriers = first_barrier + 16 * STAGES, all_left = extra_barriers, all_there = all_left + 8;
    // Of group g: its results are in shared memory, and out of it again.
    const auto staged = [&](int g) { return all_there + 8 + 16 * g; };
    const auto drained = [&](int g) { return all_there + 16 + 16 * g; };
    const auto scratch_of = [&](int g) { return ring.stages + STAGES * STAGE_BYTES + g * SCRATCH_BYTES; };
    const Received received(ring.stages + STAGES * STAGE_BYTES, extra_barriers, rank);
    if (group == CONSUMERS && warp == 0 && elected()) {
        if (EVEN) {
            barrier_init(all_left, CONSUMERS * 4);
            barrier_init(all_there, 1);
        }
        if (PUSHED) received.init();
        for (int g = 0; g < GROUPS_N * APART; ++g) barrier_init(staged(g), 4), barrier_init(drained(g), STORING);
        ring.init(0, STAGES, GROUPS_N * 4);
        const Work work(tiles_m * tiles_n, chunks);
        const Place its = place(work.tile);
        if (work.left()) Feed(x, maps, M, its.m0, its.n0).start(ring, work.begin, work.count);
    }
    __syncthreads();
    // Others need to know of the barriers alone, whose initialisation has a fence of its own.
    if (PUSHED) cluster_arrive_relaxed();

    float* buffer = reinterpret_cast<float*>(shared);
    const auto reduce = [&](auto threads) {
        const Place its = place(blockIdx.x / CLUSTER);
        reduce_and_store<E, TILE_M, TILE_N, PITCH, PARTS_K, CLUSTER, decltype(threads)::value>(
            buffer, bias, out, out_stride, its.m0, its.n0, M, N, rank, [] { barrier_sync(1, CONSUMERS * 128); });
    };
    if (group == CONSUMERS) {
        if constexpr (SHRUNK > 0) registers_shrink<SHRUNK>();
        if (warp == 0 && elected()) {
            // The compiler would compute it for every chunk, from a slow register.
            ring.stages = opaque(ring.stages);
            Window window(ring);
            bool begun = true;
            for (Work work(tiles_m * tiles_n, chunks); work.left(); work.next()) {
                const Place its = place(work.tile);
                const Feed feed(x, maps, M, its.m0, its.n0);
                if (begun)
                    feed.go_on(ring, window, work.begin, work.count, dependent);
                else
                    feed.fill(ring, window, work.begin, work.count);
                begun = false;
            }
            launch_dependents();
        }
        if (EVEN && warp == 1 && lane == 0)
            carry_messages(Work(tiles_m * tiles_n, chunks), flags, all_left, all_there, dependent);
        if (APART && warp >= 4 - STORING) {
            u32 parity = 0;
            for (Work work(tiles_m * tiles_n, chunks); work.left(); work.next()) {
                if (work.lacks_end() || work.last()) continue;
                const Place its = place(work.tile);
#pragma unroll 1
                for (int g = 0; g < GROUPS_N; ++g) {
                    const int n = its.n0 + g * GROUP_COLUMNS;
                    barrier_wait(staged(g), parity);
                    store_group(scratch_of(g), out + its.m0 * out_stride + n, out_stride, min(TILE_M, M - its.m0), N - n,
                                warp - (4 - STORING), lane);
                    __syncwarp();
                    if (lane == 0) barrier_arrive(drained(g));
                }
                parity ^= 1;
            }
        }
        // The barriers at the end want whole warps.
        __syncwarp();
    } else {
        if constexpr (GROWN > 0) registers_grow<GROWN>();
        const int part = PARTS_K == 1 ? 0 : group / GROUPS_N, column_group = group % GROUPS_N;
        const int my_tile = column_group * WORDS + warp * WORDS / 4;
        const int word = warp * WORDS % 4;
        const int first_column = my_tile * 64 + 16 * word;
        // Where in a stage this lane's words and scales are, seen from `shared`; the compiler would compute it for every chunk.
        const int ring_at = ring.stages - shared_address(shared);
        const int my_words = opaque(ring_at + WEIGHTS_AT + my_tile * 512 + lane * 16 + word * 4);
        const int my_scales = opaque(ring_at + SCALES_AT + my_tile * 128 + lane / 4 * 16 + word * 4);

        ring.advance(part);
        Scales scale, zero, normalizers;
        Factors factors[PRODUCTS];
        u32 w[2][PRODUCTS], a[2][PRODUCTS][4];  // of even and of odd rows
        // Row i of a stage.
        const auto load_row = [&](int stage, int i) {
            load_words(w[i % 2], shared + (my_words + stage * STAGE_BYTES) + i * ROW_BYTES);
        };
        // What row i's fragments need of the group that begins with it, if one does.
        const auto load_group = [&](int stage, int i) {
            if (GROUP == 0 || i % GROUP_ROWS) return;
            const unsigned char* its = shared + (my_scales + stage * STAGE_BYTES) + i / GROUP_ROWS * SCALE_BYTES;
            if (SCALING != SUMS) load_words(scale.pair, its);
            if (ZEROS) load_words(zero.pair, its + (ZEROS_AT - SCALES_AT));
        };
        const auto dequantize_row = [&](int i) {
#pragma unroll
            for (int q = 0; q < PRODUCTS; ++q) {
                u32 (&fragment)[4] = a[i % 2][q];
                if (SCALING == FUSED) {
                    if (i % GROUP_ROWS == 0) factors[q] = E::factors(E::normalize(scale.pair[q], normalizers.pair[q]));
                    scaled_codes<E>(w[i % 2][q], fragment, factors[q]);
                } else {
                    E::dequantize(w[i % 2][q], fragment, ZEROS ? E::offsets(zero.pair[q]) : E::offsets());
                    if (SCALING == WEIGHTS) scale_fragment<E>(fragment, scale.pair[q]);
                }
            }
        };
        // Calls `use` for every pair of scales in the stage, whose first group's are loaded.
        const auto each_scale = [&](int stage, auto use) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                Scales its = scale;
                if (g > 0) load_words(its.pair, shared + (my_scales + stage * STAGE_BYTES) + g * SCALE_BYTES);
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q) use(its.pair[q], q);
            }
        };

        u32 drained_parity = 0;
        for (Work work(tiles_m * tiles_n, chunks); work.left(); work.next()) {
            const Place its = place(work.tile);
            const int count = work.count;
            float sums[PRODUCTS][TILE_M / 2], group_sums[PRODUCTS][TILE_M / 2];
            float (&target)[PRODUCTS][TILE_M / 2] = SCALED_GROUPS ? group_sums : sums;
#pragma unroll
            for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
                for (int i = 0; i < TILE_M / 2; ++i) sums[q][i] = 0.f;
#pragma unroll
            for (int q = 0; q < PRODUCTS; ++q) normalizers.pair[q] = E::LARGEST_NORMALIZERS;
            if (GROUP == 0) {
                // In registers of their own: the compiler would copy one zero behind the fence of the first products.
                settle(sums);
                const int column = min(its.n0 + my_tile * 64, N - 64);
                scale = load_scales(scales + column, word, lane);
                if (ZEROS) zero = load_scales(zeros + column, word, lane);
            }
            // Rows past K have activations of zero (the copy fills them in) and finite weights. The wait for the last products
            // stands in here, not behind: the paths with and without chunks meet there, and what the compiler copies for that
            // it would copy too early.
            int chunk = part;
            if (!SPLIT || part < count) do {
                ring.wait_full();
                load_row(ring.stage, 0);
                load_row(ring.stage, 1);
                load_group(ring.stage, 0);
                if (NORMALIZED) {
                    const Scales before = normalizers;
                    each_scale(ring.stage, [&](u32 pair, int q) { normalizers.pair[q] = E::normalizers(normalizers.pair[q], pair); });
                    if (chunk != part) {
                        PerColumn ratios;
#pragma unroll
                        for (int q = 0; q < PRODUCTS; ++q) {
                            ratios.of[q][0] = E::ratio<0>(normalizers.pair[q], before.pair[q]);
                            ratios.of[q][1] = E::ratio<1>(normalizers.pair[q], before.pair[q]);
                        }
                        multiply_by(sums, ratios);
                    }
                }
                dequantize_row(0);
                Ring last = ring;
                const int entered = chunk;
                bool fits = true;
                do {
                    const Ring now = ring;
                    const u64 activations = matrix_descriptor(now.address());
                    ring.advance(PARTS_K);
                    const bool more = chunk + PARTS_K < count;
                    if (SCALED_GROUPS)
                        load_words(scale.pair, shared + (my_scales + now.stage * STAGE_BYTES));
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) {
                        if (i + 2 < ROWS) {
                            load_row(now.stage, i + 2);
                        } else if (more) {
                            if (i + 2 == ROWS) ring.wait_full();
                            load_row(ring.stage, i + 2 - ROWS);
                        }
                        if (i + GROUP_AHEAD < ROWS)
                            load_group(now.stage, i + GROUP_AHEAD);
                        else if (more)
                            load_group(ring.stage, i + GROUP_AHEAD - ROWS);
                        const u64 b = activations + (i / 4 * SLAB_BYTES + i % 4 * 32) / 16;
                        matrix_fence();
#pragma unroll
                        for (int q = 0; q < PRODUCTS; ++q) {
                            // A group's first products don't add to what the registers hold.
                            if (SCALED_GROUPS && i == 0)
                                Matrix::multiply<false>(target[q], a[i % 2][q], b, E());
                            else
                                Matrix::multiply<true>(target[q], a[i % 2][q], b, E());
                        }
                        matrix_commit();
                        // The products of the row before are done, so its registers may be written again.
                        matrix_wait<1>();
                        if (!SCALED_GROUPS && i == 0 && chunk != entered) {
                            __syncwarp();
                            if (lane == 0) last.release();
                        }
                        if (NORMALIZED && i + 1 == ROWS && more) {
                            u32 outgrown = 0;
                            each_scale(ring.stage, [&](u32 pair, int q) { outgrown |= E::outgrown(E::normalize(pair, normalizers.pair[q])); });
                            fits = !__any_sync(0xffffffffu, outgrown);
                        }
                        dequantize_row(i + 1);
                    }
                    last = now;
                    if (SCALED_GROUPS) {
                        matrix_wait<0>();
                        settle(target);
                        if (lane == 0) now.release();
                        add_scaled(sums, group_sums, scale);
                    }
                    chunk += PARTS_K;
                } while (chunk < count && fits);
                if (!SCALED_GROUPS) {
                    matrix_wait<0>();
                    settle(sums);
                    if (lane == 0) last.release();
                }
            } while (NORMALIZED && chunk < count);
            if (SCALING == SUMS && GROUP == 0) multiply_by(sums, scale);
            // What sums are multiplied by on their way.
            PerColumn units;
            units.set(1.f);
            if (SCALING == FUSED) {
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q)
                    units.of[q][0] = E::unit<0>(normalizers.pair[q]), units.of[q][1] = E::unit<1>(normalizers.pair[q]);
            }
            if constexpr (PUSHED) {
                // The owners have started and expect what comes.
                cluster_wait();
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
                    for (int c = 0; c < TILE_M / 8; ++c) {
                        const float *v = sums[q] + 4 * c, *unit = units.of[q];
                        const float four[4] = {v[0] * unit[0], v[1] * unit[0], v[2] * unit[1], v[3] * unit[1]};
                        received.send(four, rank * PARTS_K + part, first_column / 16 + q, c, lane);
                    }
                received.add_and_store<CONSUMERS * 4>(bias == nullptr ? nullptr : bias + its.n0,
                                                      out + its.m0 * out_stride + its.n0, out_stride, M - its.m0,
                                                      N - its.n0, dependent, group * 4 + warp, lane);
            } else if constexpr (SPLIT) {
                // When all consumers are here all stages are read; their memory becomes the buffer [part][m][n].
                barrier_sync(1, CONSUMERS * 128);
#pragma unroll
                for (int q = 0; q < PRODUCTS; ++q)
#pragma unroll
                    for (int i = 0; i < TILE_M / 2; ++i) {
                        const int m = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                        const int n = first_column + 16 * q + lane / 4 + 8 * (i / 2 % 2);
                        buffer[(part * TILE_M + m) * PITCH + n] = sums[q][i] * units.of[q][i / 2 % 2];
                    }
                // Without a cluster the filling warpgroup has nothing to wait for.
                if constexpr (CLUSTER == 1) reduce(Number<CONSUMERS * 128>());
            } else {
                const int n = its.n0 + first_column;
                if constexpr (EVEN) {
                    const int its_warp = group * 4 + warp;
                    constexpr int WARPS = CONSUMERS * 4;
                    if (work.lacks_end()) {
                        if (n < N) leave_sums(sums, units, partials + (blockIdx.x * WARPS + its_warp) * WARP_SUMS, lane);
                        __syncwarp();
                        if (lane == 0) barrier_arrive(all_left);
                        continue;
                    }
                    if (work.begin > 0) {
                        barrier_wait(all_there, 0);
                        for (int block = blockIdx.x; n < N && work.lacks_begin(block);) {
                            add_sums(sums, units, partials + (--block * WARPS + its_warp) * WARP_SUMS, lane);
                            units.set(1.f);
                        }
                    }
                }
                const PerColumn shifts = load_shifts(bias == nullptr || n >= N ? nullptr : bias + n, lane);
                // What others still store; a new barrier counts as past its odd phase.
                if constexpr (APART) {
                    barrier_wait(drained(group), drained_parity ^= 1);
                    if (!work.last()) {
                        const u32 to = scratch_of(group) + warp * WARP_COLUMNS * 2;
#pragma unroll
                        for (int turn = 0; turn < TURNS; ++turn)
                            transpose_turn(turn, sums, units, shifts, to + turn * TURN_ROWS * APART_PITCH, APART_PITCH, lane);
                        __syncwarp();
                        if (lane == 0) barrier_arrive(staged(group));
                        continue;
                    }
                }
                if (n < N)
                    store_columns(sums, units, shifts, scratch_of(group) + warp * NARROW_BYTES, out + its.m0 * out_stride + n,
                                  out_stride, M - its.m0, lane);
            }
        }
    }
    if constexpr (CLUSTER > 1 && !PUSHED) reduce(Number<THREADS>());
}
