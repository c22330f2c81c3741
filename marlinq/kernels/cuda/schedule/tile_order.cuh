// The order in which tiles of the output are taken: bands of BAND batch tiles, inside a band column by column. So what a wave
// of blocks reads stays in L2.
#pragma once

// Where a tile begins.
struct TilePlace {
    int m0, n0;
};

template <int TileM, int TileN>
struct TileOrder {
    static constexpr int BAND = 1024 / TileM;

    int tiles_m, tiles_n, band_tiles;
    float bands_a_tile;

    __device__ __forceinline__ TileOrder(int M, int N)
        : tiles_m((M + TileM - 1) / TileM),
          tiles_n((N + TileN - 1) / TileN),
          band_tiles(BAND * tiles_n),
          bands_a_tile(1.f / (float)band_tiles) {}

    __device__ __forceinline__ int tiles() const { return tiles_m * tiles_n; }

    // An integer division takes longer than a barrier, so this takes a reciprocal, and nothing for a single batch tile.
    __device__ __forceinline__ TilePlace place(int tile) const {
        if (tiles_m == 1) return TilePlace{0, tile * TileN};
        // Off by one at most: no memory holds the results of 2^24 tiles, of 64 x 64 at least where a batch has several.
        int band = (int)((float)tile * bands_a_tile), rest = tile - band * band_tiles;
        if (rest < 0) --band, rest += band_tiles;
        if (rest >= band_tiles) ++band, rest -= band_tiles;
        const int height = tiles_m - band * BAND;
        if (height >= BAND) return TilePlace{(band * BAND + rest % BAND) * TileM, rest / BAND * TileN};
        return TilePlace{(band * BAND + rest % height) * TileM, rest / height * TileN};
    }
};
