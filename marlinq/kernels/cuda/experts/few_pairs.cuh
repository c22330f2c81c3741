// Sorts a few pairs by expert inside every block that needs their order. So no launch sorts them (experts/route.cuh) or gathers
// their rows: a block loads rows directly from the batch.
//
//   1. lanes with the same expert find each other (match.any); the first of them writes how many they are to counts[warp][expert]
//   2. thread e sums expert e's counts over the warps, and leaves in their place what the warps before have
//   3. a scan over the experts gives their first rows and tiles
//   4. thread e leaves a record for each of its tiles, thread p the row of the batch that pair p is of
//
// Equal pairs keep their order, so the sorted rows are those of experts/route.cuh.
#pragma once
#include "fault_site.cuh"
#include "experts/records.cuh"
#include "experts/scan.cuh"
#include "ptx/vote.cuh"

// The pairs to sort. `places` gets a pair's sorted row, -1 if its expert is on another GPU; null: another block writes it.
struct PairsGiven {
    const int *ids, *map;
    int* places;
    int pairs, top, experts, map_size;
};

// A record in half the memory: rows and tiles are few.
struct __align__(8) ShortRecord {
    u16 expert, first_tile, first_row, rows;
};

// In shared memory. A block has at least as many threads as there may be experts and pairs, both multiples of 32.
template <int Threads, int Experts, int Pairs, int TileM, bool Wide>
struct FewPairs {
    static constexpr int TILES = Pairs / TileM + (Pairs < Experts ? Pairs : Experts);
    static_assert(Experts <= Threads && Pairs <= Threads && Experts % 32 == 0 && Pairs % 32 == 0, "a thread an expert, and a pair");

    static constexpr int WARPS = Pairs / 32;

    u32 counts[WARPS * Experts / 2];  // of 16 bits
    ShortRecord records[TILES];
    u16 first_rows[Experts];
    u16 sources[Pairs];  // of sorted rows: the row of the batch
    u32 sums[Experts / 32];

    __device__ __forceinline__ ExpertRecord operator[](int tile) const {
        const ShortRecord record = records[tile];
        return {record.expert, record.first_tile, record.first_row, record.rows};
    }

    // Call it before `sort`. It reads nothing that an earlier kernel writes.
    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < WARPS * Experts / 2; i += Threads) counts[i] = 0;
        __syncthreads();
    }

    // Returns how many tiles there are, in every thread. All threads of the block take part.
    __device__ __forceinline__ int sort(const PairsGiven& given) {
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        u16* const of_warps = reinterpret_cast<u16*>(counts);
        int mine = -1, rank = 0;
        if (warp < WARPS) {
            if (thread < given.pairs) mine = local_expert<Wide>(given.ids, thread, given.map, given.map_size, given.experts);
            const u32 same = lanes_with_same(mine);
            rank = count_bits(same & ((1u << lane) - 1));
            if (mine >= 0 && rank == 0) of_warps[warp * Experts + mine] = (u16)count_bits(same);
        }
        FAULT_SITE(ids_there, __syncthreads();)

        // Rows in the low half, tiles in the high one.
        u32 own = 0, before = 0;
        if (thread < Experts) {
            int count = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const int here = of_warps[w * Experts + thread];
                of_warps[w * Experts + thread] = (u16)count;
                count += here;
            }
            own = (u32)count | (u32)((count + TileM - 1) / TileM) << 16;
            int of_warp;
            before = (u32)scan_warp((int)own, lane, of_warp);
            if (lane == 0) sums[warp] = (u32)of_warp;
        }
        __syncthreads();
        u32 all = 0;
#pragma unroll
        for (int w = 0; w < Experts / 32; ++w) {
            const u32 theirs = sums[w];
            if (w < warp) before += theirs;
            all += theirs;
        }
        if (thread < Experts) {
            first_rows[thread] = (u16)before;
            for (u32 tile = 0; tile < own >> 16; ++tile)
                records[(before >> 16) + tile] = ShortRecord{(u16)thread, (u16)(before >> 16), (u16)before, (u16)own};
        }
        __syncthreads();
        if (thread < given.pairs) {
            const int place = mine < 0 ? -1 : FAULT_SITE(few_pairs_place, first_rows[mine] + of_warps[warp * Experts + mine] + rank);
            if (place >= 0) sources[place] = (u16)(FAULT_SITE(few_pairs_row, thread / given.top));
            // Only one of the blocks that sort the same pairs writes the result.
            if (given.places && blockIdx.x == 0) given.places[thread] = place;
        }
        __syncthreads();
        return (int)(all >> 16);
    }
};
