// Which tiles a block works on, one after the other, and which chunks of K of each. Three schedules:
//
//   split-K      one tile; the blocks of a cluster, and the parts of a block, have slices of its chunks
//   persistent   the grid is what fits the GPU at once; a block takes every gridDim.x-th tile, whole
//   stream-K     as persistent, but the last one to two tiles a block are divided evenly, in chunks of K (Osama et al.,
//                "Stream-K", PPoPP 2023)
//
// Stream-K. Block b has the run [first(b), first(b + 1)) of the divided tiles' chunks. It works the run off tile by tile from
// the end, then its whole tiles:
//
//   tiles     |     t      |   t + 1    |   t + 2    |       block b:  1. t + 2, whose last chunks it lacks: it leaves
//   blocks    ... b - 1 |        b         |  b + 1 ...                  its sums in memory, for a higher block
//                                                                     2. t + 1   3. t, adding the sums of block b - 1
//                                                                     4. its whole tiles
//
// The block with a tile's last chunk stores the tile. A run ends inside at most one tile, so a block leaves sums at most once, and
// does so before it waits for others'. It waits only for lower blocks, which start no later than itself. So a launch can't deadlock,
// however few of its blocks run at once, and waits are short. Sums are added in the order of falling blocks: launches of the same
// shape give the same bits.
#pragma once
#include "ptx/types.cuh"

template <typename Shape>
struct TileWork {
    int tile, begin, count;  // chunks: the first, how many

    __device__ __forceinline__ TileWork(int all_tiles, int all_chunks) : tiles(all_tiles), chunks(all_chunks) {
        const int block = blockIdx.x;
        if constexpr (Shape::STREAM_K) {
            const Runs runs(*this);
            end_run_at(runs, runs.first(block + 1));
        } else {
            const u32 rank = block % Shape::CLUSTER;
            tile = block / Shape::CLUSTER;
            begin = chunks * rank / Shape::CLUSTER;
            count = (int)(chunks * (rank + 1) / Shape::CLUSTER) - begin;
        }
    }
    __device__ __forceinline__ bool left() const {
        if constexpr (Shape::STREAM_K) return count > 0;
        return Shape::SPLIT ? tile == blockIdx.x / Shape::CLUSTER : tile < tiles;
    }
    __device__ __forceinline__ void next() {
        if constexpr (Shape::STREAM_K) {
            const Runs runs(*this);
            if (tile >= runs.tile) {
                const int start = runs.unit(*this);
                if (start > runs.first(blockIdx.x)) return end_run_at(runs, start);
                tile = blockIdx.x - runs.grid;
            }
            tile += runs.grid, begin = 0, count = tile < runs.tile ? chunks : 0;
        } else {
            tile += gridDim.x;
        }
    }
    // Whether higher blocks have the tile's last chunks.
    __device__ __forceinline__ bool lacks_end() const { return begin + count < chunks; }
    // Whether the block has no tile behind this one.
    __device__ __forceinline__ bool last() const {
        TileWork after = *this;
        after.next();
        return !after.left();
    }
    // For a tile whose first chunks belong to lower blocks: whether `block`, which has some of its chunks, lacks the first one. Then
    // the block below has chunks of the tile, too.
    __device__ __forceinline__ bool lacks_begin(int block) const {
        const Runs runs(*this);
        return runs.first(block) > runs.unit(*this) - begin;
    }

private:
    int tiles, chunks;

    // The divided tiles, from `tile` on, and the blocks' runs of their chunks. Computed where it is needed if registers are
    // short.
    struct Runs {
        int grid, tile, units, chunks;
        __device__ __forceinline__ explicit Runs(const TileWork& work)
            : grid(Shape::FEW_REGISTERS ? opaque(gridDim.x) : gridDim.x),
              tile(max(work.tiles / grid - 1, 0) * grid),
              units((work.tiles - tile) * work.chunks),
              chunks(work.chunks) {}
        __device__ __forceinline__ int first(int block) const { return units / grid * block + min(block, units % grid); }
        __device__ __forceinline__ int unit(const TileWork& work) const { return (work.tile - tile) * chunks + work.begin; }
    };
    // Takes the chunks of the block's run before `end` that are of one tile.
    __device__ __forceinline__ void end_run_at(const Runs& runs, int end) {
        tile = (end - 1) / chunks;
        const int start = max(runs.first(blockIdx.x), tile * chunks);
        begin = start - tile * chunks, count = end - start;
        tile += runs.tile;
    }
};
