// Division of work among blocks and warps of the persistent kernel, and its shared memory.
//
// Work. The grid has PARTS blocks for every group of columns. Block b owns part b % PARTS of K, in units of 128 channels, of
// the columns of group b / PARTS: neighbouring tiles of 64 columns, whole pairs where gate and up take turns. It works them off
// in sets of four, two or one tile.
//
// Warps. TEAMS teams of TEAM warps multiply: a stage of the ring is TEAM units, one for each warp of the team that owns the
// stage: one or more units of K of all tiles of a set, so that a warp stays with one tile. SLOTS warps add their sums, a slot
// of a set each, and send them. One warp is the TMA producer.
//
//   | ring: STAGES of words | STAGES of scales, zero points | activations, or attention | residual stream | SLOTS of sums |
#pragma once
#include "persistent/arguments.cuh"

constexpr int PARTS = 4;
constexpr int MAX_SPLITS = 16;   // of a context
constexpr int LEAST_CHUNKS = 2;  // of the cache that are worth a part

template <typename C>
struct StepShape {
    static constexpr int TEAM = C::TEAM, TEAMS = C::TEAMS, STAGES = C::STAGES, WINDOW = C::WINDOW;
    static constexpr int SLOTS = C::SLOTS, HEAD_DIM = C::HEAD_DIM, QUANT_GROUP = C::QUANT_GROUP;
    static constexpr bool ZEROS = C::ZEROS, SOFTCAP = C::SOFTCAP;
    static constexpr bool POST_NORMS = C::POST_NORMS;  // behind o and down

    static constexpr int UNIT = 128;  // channels
    static constexpr int UNIT_ROWS = UNIT / 16, UNIT_GROUPS = UNIT / QUANT_GROUP, QUANT_GROUP_ROWS = UNIT_ROWS / UNIT_GROUPS;
    static constexpr int UNIT_BYTES = UNIT_ROWS * C::Codec::TILE_BYTES, UNIT_SCALE_BYTES = UNIT_GROUPS * 128;
    static constexpr int BYTES = TEAM * UNIT_BYTES;  // of a stage's words
    static constexpr int ZEROS_AT = TEAM * UNIT_SCALE_BYTES, SCALE_BYTES = (ZEROS ? 2 : 1) * ZEROS_AT;
    static constexpr int UNIT_COPIED_BYTES = UNIT_BYTES + (ZEROS ? 2 : 1) * UNIT_SCALE_BYTES;

    static constexpr int WARPS = TEAM * TEAMS;  // that multiply
    static constexpr int EPILOGUE_WARPS = SLOTS, PRODUCER = WARPS + EPILOGUE_WARPS, THREADS = 32 * (PRODUCER + 1);

    static constexpr int LOG_TEAM = TEAM == 4 ? 2 : 1, WIDEST = LOG_TEAM;  // log2 of the widest set's tiles
    static_assert(TEAM == 2 || TEAM == 4, "sets of tiles divide a team");

    // Sums of a set of tiles: [contribution][tile][64 columns].
    static constexpr int SLOT_BYTES = WARPS * 64 * 4;

    // Digits of a unit: the digits, their sums by quantisation group, their weights.
    static constexpr int PLAIN_AT = 512, DIGIT_UNIT_AT = PLAIN_AT + 16 * UNIT_GROUPS, DIGIT_STRIDE = DIGIT_UNIT_AT + 16;

    // Attention: queries, the new key and value, scores of the new position, and what the teams leave.
    static constexpr int QUERY_BYTES = 8 * HEAD_DIM * 2, NEW_AT = QUERY_BYTES, SCORES_AT = NEW_AT + 2 * HEAD_DIM * 4;
    static constexpr int ENTRIES_AT = SCORES_AT + 8 * 4;
    static constexpr int CHUNK = TEAM * 1024 / HEAD_DIM < 32 ? TEAM * 1024 / HEAD_DIM : 32;  // positions of the cache in a stage
    static constexpr int POSITION_SLAB_BYTES = CHUNK * 128, CACHE_BYTES = HEAD_DIM / 64 * POSITION_SLAB_BYTES;
    static_assert(2 * CACHE_BYTES <= BYTES, "a stage holds a chunk of keys and values");
    static_assert(HEAD_DIM % (16 * TEAM) == 0, "warps of a team share the channels of an output");
    static_assert(STAGES % TEAMS == 0, "a stage belongs to one team, which then sees all of its phases");

    static constexpr int RING_BYTES = STAGES * BYTES;
    static constexpr int SCALES_AT = RING_BYTES, ACTIVATIONS_AT = SCALES_AT + STAGES * SCALE_BYTES;
    // The block's part of the residual stream [STREAM_CHANNELS], as the element; and of what is to be added to it.
    static constexpr int STREAM_CHANNELS = C::STREAM_UNITS * UNIT, STREAM_AT = ACTIVATIONS_AT + C::ACTIVATION_BYTES;
    static constexpr int SLOTS_AT = STREAM_AT + (POST_NORMS ? 2 : 1) * STREAM_CHANNELS * 2;
    static constexpr int SHARED_BYTES = SLOTS_AT + SLOTS * SLOT_BYTES + 1024;  // 1024: lost at most by aligning the ring
    static_assert(C::SHARED_BYTES == SHARED_BYTES, "host and kernel count different bytes of shared memory");
    static_assert(C::ACTIVATION_BYTES % 128 == 0, "sums are aligned");
};

// Tiles that are worked off together.
template <typename S>
struct TileSet {
    int log;     // logarithm of the tiles in a stage
    int slices;  // logarithm of the units of K in a stage
    int stages;

    __device__ __forceinline__ int tiles() const { return 1 << log; }
    // The first unit of K of stage s.
    __device__ __forceinline__ int unit_of(int s) const { return s << slices; }
    // Partial sums that the teams leave for each tile.
    __device__ __forceinline__ int contributions() const { return min(S::TEAMS, stages) << slices; }
};

// A block's share of a product.
template <typename S>
struct Share {
    int first, units;       // of K
    int first_tile, tiles;  // of columns
    int group;              // of columns

    // Computed once and kept in shared memory: divisions take longer than reading it.
    __device__ __forceinline__ void make(const ProductShape& shape, int product) {
        const int part = blockIdx.x % PARTS, all = (shape.channels + S::UNIT - 1) / S::UNIT;
        const int groups = gridDim.x / PARTS;
        group = blockIdx.x / PARTS;
        first = all * part / PARTS;
        units = all * (part + 1) / PARTS - first;
        const int width = product == GATE_UP ? 2 : 1, columns = shape.tiles / width;
        first_tile = columns * group / groups * width;
        tiles = columns * (group + 1) / groups * width - first_tile;
    }
    // The set of tiles that begins at the block's tile `at`.
    __device__ __forceinline__ TileSet<S> set(int at) const {
        const int left = tiles - at, log = S::WIDEST == 2 && left >= 4 ? 2 : left >= 2 ? 1 : 0, slices = S::LOG_TEAM - log;
        return {log, slices, (units + (1 << slices) - 1) >> slices};
    }
};

// A unit of the attention: a head of keys, and part `split` of `splits` parts of the context.
struct AttentionUnit {
    int kv_head, split, splits;
};

template <typename S>
struct Plan {
    int splits;   // parts of the context
    int length;   // positions in the cache before this step
    int queries;  // heads of queries that share a head of keys
    int units;    // of the attention
    Share<S> shares[PRODUCTS];

    // The context is split so that all blocks have work, into parts of at least LEAST_CHUNKS chunks.
    __device__ __forceinline__ void make(const StepArguments& step) {
        for (int product = 0; product < PRODUCTS; ++product) shares[product].make(step.shape[product], product);
        queries = step.heads / step.kv_heads;
        // A step behind a full cache has no valid result, but must not write behind the cache.
        length = min(*step.length, step.capacity - 1);
        const int chunks = (length + S::CHUNK - 1) / S::CHUNK;
        const int share = max((chunks * step.kv_heads + (int)gridDim.x - 1) / (int)gridDim.x, LEAST_CHUNKS);
        splits = max(1, min(MAX_SPLITS, (chunks + share - 1) / share));
        units = step.kv_heads * splits;
    }
    __device__ __forceinline__ AttentionUnit unit(int index) const { return {index / splits, index % splits, splits}; }
};

// Chunks of the cache that a unit reads.
template <typename S>
struct Chunks {
    int begin, count;
    int first_position, length;  // positions in the chunks that count

    __device__ __forceinline__ Chunks(const AttentionUnit& unit, int positions, int window) {
        length = positions;
        first_position = window > 0 ? max(0, positions + 1 - window) : 0;
        const int from = first_position / S::CHUNK, to = (positions + S::CHUNK - 1) / S::CHUNK;
        const int all = max(to - from, 0), share = (all + unit.splits - 1) / unit.splits;
        begin = from + unit.split * share;
        count = max(0, min(share, to - begin));
    }
};
