// Records of sorted pairs, which one kernel of a routed layer writes and the others read.
//
// A pair is a row of the batch and one of its experts, number  row * T + slot.  Sorted by expert, pairs are the rows of the
// grouped products: expert e has rows first_row .. first_row + rows - 1, cut into tiles of TILE_M. Every tile has a record,
// that of its expert, so that a block finds any tile with one load.
#pragma once
#include "fault_site.cuh"
#include "ptx/memory.cuh"
#include "schedule/tile_order.cuh"

struct __align__(16) ExpertRecord {
    int expert, first_tile, first_row, rows;
};

// Records in global memory, written by an earlier kernel.
struct StoredRecords {
    const ExpertRecord* records;

    __device__ __forceinline__ ExpertRecord operator[](int tile) const {
        const uint4 v = load_l2(records + tile);
        return {(int)v.x, (int)v.y, (int)v.z, (int)v.w};
    }
};

// Index of an expert of the router among those on this GPU; -1 if it is on another one.
template <bool WIDE>
__device__ __forceinline__ int local_expert(const int* ids, i64 pair, const int* map, int map_size, int experts) {
    // An id of 64 bits whose high half is not zero is no expert's.
    const int low = ids[WIDE ? 2 * pair : pair];
    const bool known = !WIDE || ids[2 * pair + 1] == 0;
    if (!known || low < 0) return -1;
    if (map == nullptr) return low < experts ? low : -1;
    const int place = low < map_size ? map[low] : -1;
    return place < experts ? place : -1;
}

// A tile of a grouped product.
struct ExpertTile {
    int expert, m0, rows, n0;  // m0: first sorted row; rows: as many of the tile exist
};

// The tiles of a grouped product: experts one after the other, each in bands of rows (schedule/tile_order.cuh). Records are
// StoredRecords, or those that the block has made itself (experts/few_pairs.cuh).
template <int TileM, int TileN, typename Records>
struct ExpertTiles {
    const Records& records;
    int tiles_n, N;

    __device__ __forceinline__ ExpertTiles(const Records& all, int columns)
        : records(all), tiles_n((columns + TileN - 1) / TileN), N(columns) {}

    __device__ __forceinline__ ExpertTile find(int tile) const {
        // An expert's tiles begin at first_tile * tiles_n, so this is a record of the right expert.
        const ExpertRecord record = records[tile / tiles_n];
        const TileOrder<TileM, TileN> order(record.rows, N);
        const TilePlace at = order.place(tile - record.first_tile * tiles_n);
        return {record.expert, record.first_row + at.m0, FAULT_SITE(expert_rows, min(TileM, record.rows - at.m0)), at.n0};
    }
};
