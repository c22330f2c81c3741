// A lane's words of a tile of Codec::ROW_CHANNELS channels (16; 32 where weights are sparse) x 64 columns, for any codec.
//
// A tile is Codec::PLANES planes of 32 * Codec::LANE_BYTES bytes, in which lane l has LANE_BYTES at LANE_BYTES * l. So a plane is read by
// a warp without bank conflicts. Side by side, a lane's words are those of 16-column blocks 0..3 of the tile, Codec::BLOCK_WORDS each:
// 4 bits a code are one plane of 512 bytes and a word a block, 8 bits two planes and two words a block.
//
// Sparse weights have two planes of 256 bytes, a word a block: a warp of a warpgroup reads one or two blocks, and lanes whose
// words were 16 bytes apart would meet bank conflicts. Behind them lie two planes of 128 bytes, a word a lane, with places for
// blocks 0, 1 and 2, 3.
#pragma once
#include "fault_site.cuh"
#include "ptx/types.cuh"

constexpr int PLACE_BYTES = 128;  // of a plane of places

// A lane's places of kept channels in `Blocks` neighbouring blocks: nothing for dense weights.
template <bool Sparse, int Blocks>
struct LanePlaces {
    __device__ __forceinline__ void load(const void*) {}
};

template <int Blocks>
struct LanePlaces<true, Blocks> {
    u32 of[(Blocks + 1) / 2];

    __device__ __forceinline__ void load(const void* at) {
#pragma unroll
        for (int j = 0; j < (Blocks + 1) / 2; ++j) of[j] = reinterpret_cast<const u32*>(at)[j * (PLACE_BYTES / 4)];
    }
};

// A lane's words of `Blocks` (1, 2 or 4) neighbouring blocks.
template <typename Codec, int Blocks>
struct LaneWords {
    static constexpr int COUNT = Blocks * Codec::BLOCK_WORDS;
    u32 of[COUNT];
    LanePlaces<Codec::SPARSE, Blocks> places;

    static constexpr int PLANE_WORDS = Codec::LANE_BYTES / 4, PLANE_BYTES = 32 * Codec::LANE_BYTES;

    // Bytes from a tile to the lane's words of block `first`, a multiple of Blocks.
    static __device__ __forceinline__ int words_offset(int first, int lane) {
        const int word = first * Codec::BLOCK_WORDS;
        return word / PLANE_WORDS * PLANE_BYTES + lane * Codec::LANE_BYTES + word % PLANE_WORDS * 4;
    }
    // Bytes from a tile to the lane's places for block `first`. The tensor cores read the places of odd blocks from lanes 2 and 3 of
    // every four. A lone block gets its own into lanes 0 and 1, so that all warps of a warpgroup name the same lanes.
    static __device__ __forceinline__ int places_offset(int first, int lane) {
        const int from = Blocks == 1 ? lane ^ FAULT_SITE(places_of_lone_block, first % 2 * 2) : lane;
        return Codec::PLANES * PLANE_BYTES + first / 2 * PLACE_BYTES + from * 4;
    }
    // `at` and `places_at`: the words and the places in shared memory.
    __device__ __forceinline__ void load(const void* at, const void* places_at) {
        places.load(places_at);
        load(at);
    }
    // The words alone.
    __device__ __forceinline__ void load(const void* at) {
        if constexpr (COUNT == 1) {
            of[0] = *reinterpret_cast<const u32*>(at);
        } else if constexpr (COUNT == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            of[0] = v.x, of[1] = v.y;
        } else if constexpr (PLANE_WORDS == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(at), u = reinterpret_cast<const uint2*>(at)[PLANE_BYTES / 8];
            of[0] = v.x, of[1] = v.y, of[2] = u.x, of[3] = u.y;
        } else {
#pragma unroll
            for (int plane = 0; plane < COUNT / 4; ++plane) {
                const uint4 v = reinterpret_cast<const uint4*>(at)[plane * (PLANE_BYTES / 16)];
                of[4 * plane] = v.x, of[4 * plane + 1] = v.y, of[4 * plane + 2] = v.z, of[4 * plane + 3] = v.w;
            }
        }
    }
    // The words of block q.
    __device__ __forceinline__ const u32* block(int q) const { return of + q * Codec::BLOCK_WORDS; }
};
