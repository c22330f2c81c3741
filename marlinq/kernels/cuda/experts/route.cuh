// Sorts the pairs of a batch by expert and brings their activations into that order.
//
//   places[pair]      the pair's sorted row, -1 if its expert is on another GPU
//   records, tiles    records of the tiles of TILE_M sorted rows, and the number of tiles (experts/records.cuh)
//   gathered[row]     x of the pair's row
//
// A counting sort without atomics, so that equal pairs keep their order. A block sorts up to 1024 pairs, one a thread:
//
//   1. lanes with the same expert find each other (match.any); the first of them writes how many they are to counts[warp][expert]
//   2. thread e sums expert e's counts over the warps, and leaves in their place what the warps before have
//   3. a scan over the experts gives their first rows and tiles
//
// STEP. ALL: for few pairs, every block sorts all of them, and gathers those of one row of the batch. Otherwise pairs are divided
// into runs of 1024. One launch COUNTs the pairs of each run, the next PLACEs them with the counts of all runs. There `shares`
// blocks sort the same run, and each gathers its share of the rows: a single block would take longer for that than for all the rest.
//
// Configuration: THREADS (1024), EXPERTS (a multiple of 32, at most 512), TILE_M, STEP, WIDE (64-bit ids).
#pragma once
#include "fault_site.cuh"
#include "experts/records.cuh"
#include "experts/scan.cuh"
#include "ptx/launch.cuh"
#include "ptx/vote.cuh"

enum class RouteStep { ALL, COUNT, PLACE };

template <typename C>
struct Route {
    static constexpr int THREADS = C::THREADS, WARPS = THREADS / 32, EXPERTS = C::EXPERTS, TILE_M = C::TILE_M;
    static constexpr RouteStep STEP = C::STEP;
    static_assert(THREADS == 1024 && EXPERTS <= 512 && EXPERTS % 32 == 0, "a thread an expert, and counts in static memory");

    static __device__ __forceinline__ void run(const int* ids, const int* map, const u16* x, int* counts,
                                               ExpertRecord* records, int* tiles, int* places, uint4* gathered, int M, int T,
                                               int H, int experts, int map_size, int shares, i64 x_stride) {
        __shared__ u16 of_warps[WARPS * EXPERTS];
        __shared__ int first_rows[EXPERTS];
        __shared__ int rows_of_warps[WARPS];
        __shared__ int tiles_of_warps[WARPS];
        __shared__ int own_places[THREADS];

        launch_dependents();
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        const int run = STEP == RouteStep::PLACE ? blockIdx.x / shares : blockIdx.x;
        const i64 pairs = (i64)M * T, first = STEP == RouteStep::ALL ? 0 : (i64)run * THREADS;
        for (int i = thread; i < WARPS * EXPERTS / 2; i += THREADS) reinterpret_cast<u32*>(of_warps)[i] = 0;
        FAULT_SITE(route_waits, wait_for_previous_kernel();)
        const i64 pair = first + thread;
        const int expert = pair < pairs ? local_expert<C::WIDE>(ids, pair, map, map_size, experts) : -1;
        FAULT_SITE(route_counters_cleared, __syncthreads();)
        const u32 same = lanes_with_same(expert);
        const int rank = count_bits(same & ((1u << lane) - 1));
        if (expert >= 0 && rank == 0) of_warps[warp * EXPERTS + expert] = (u16)count_bits(same);
        __syncthreads();

        int before = 0, all = 0;
        if (thread < EXPERTS) {
            int count = 0;
#pragma unroll 8
            for (int w = 0; w < WARPS; ++w) {
                const int here = of_warps[w * EXPERTS + thread];
                of_warps[w * EXPERTS + thread] = (u16)count;
                count += here;
            }
            if (STEP == RouteStep::COUNT) counts[(i64)run * EXPERTS + thread] = count;
            if (STEP == RouteStep::ALL) all = count;
            if (STEP == RouteStep::PLACE) {
#pragma unroll 8
                for (int other = 0; other < gridDim.x / shares; ++other) {
                    const int theirs = load_l2_word(reinterpret_cast<const u32*>(counts) + other * EXPERTS + thread);
                    if (other < run) before += theirs;
                    all += theirs;
                }
            }
        }
        if (STEP == RouteStep::COUNT) return;

        const int my_tiles = (all + TILE_M - 1) / TILE_M;
        int warp_rows, warp_tiles;
        int first_row = scan_warp(all, lane, warp_rows), first_tile = scan_warp(my_tiles, lane, warp_tiles);
        if (lane == 0) rows_of_warps[warp] = warp_rows, tiles_of_warps[warp] = warp_tiles;
        __syncthreads();
        for (int w = 0; w < EXPERTS / 32; ++w)
            if (w < warp) first_row += rows_of_warps[w], first_tile += tiles_of_warps[w];
        if (thread < EXPERTS) {
            first_rows[thread] = first_row + before;
            if (blockIdx.x == 0) {
                for (int tile = 0; tile < my_tiles; ++tile)
                    records[first_tile + tile] = ExpertRecord{thread, first_tile, first_row, all};
                if (thread == EXPERTS - 1) *tiles = first_tile + my_tiles;
            }
        }
        __syncthreads();
        const int place = expert < 0 ? -1 : FAULT_SITE(route_place, first_rows[expert] + of_warps[warp * EXPERTS + expert] + rank);
        own_places[thread] = place;
        // Only one of the blocks that sort the same pairs writes the result.
        const int share = STEP == RouteStep::ALL ? blockIdx.x : blockIdx.x % shares;
        if (pair < pairs && share == 0) places[pair] = place;
        __syncthreads();

        // A warp a pair.
        const int portion = STEP == RouteStep::ALL ? T : THREADS / shares;
        const i64 from = first + share * portion, last = from + portion;
        const i64 end = last < pairs ? last : pairs;
        for (i64 mine = from + warp; mine < end; mine += WARPS) {
            const int to = own_places[mine - first];
            if (to < 0) continue;
            const uint4* source = reinterpret_cast<const uint4*>(x + mine / T * x_stride);
            uint4* target = gathered + (i64)to * (H / 8);
            // Loaded together before the first is stored: the compiler does not move a load before a store that may alias it.
            constexpr int TOGETHER = 8;
            for (int from = lane; from < H / 8; from += 32 * TOGETHER) {
                uint4 some[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
                    if (from + 32 * i < H / 8) some[i] = source[from + 32 * i];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
                    if (from + 32 * i < H / 8) target[from + 32 * i] = some[i];
            }
        }
    }
};

#define INSTANTIATE_EXPERTS_ROUTE(NAME, CONFIGURATION)                                                                     \
    extern "C" __global__ void __launch_bounds__(CONFIGURATION::THREADS)                                                   \
    NAME(const int* ids, const int* map, const u16* x, int* counts, ExpertRecord* records, int* tiles, int* places,        \
         uint4* gathered, int M, int T, int H, int experts, int map_size, int shares, i64 x_stride) {                      \
        Route<CONFIGURATION>::run(ids, map, x, counts, records, tiles, places, gathered, M, T, H, experts, map_size, shares,  \
                                  x_stride);                                                                               \
    }
