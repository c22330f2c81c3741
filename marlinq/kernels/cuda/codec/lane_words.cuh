// A lane's words of a tile of Codec::ROW_CHANNELS channels (16, of sparse weights 32) x 64 columns, for any codec.
//
// A tile is Codec::PLANES planes of 512 bytes, in which lane l has the 16 bytes at 16 l. So a plane is read by a warp without bank
// conflicts, and is a vector a lane of any copy. Side by side, a lane's words are those of 16-column blocks 0..3 of the tile,
// Codec::BLOCK_WORDS each: 4 bits a code are one plane and a word a block, 8 bits two planes and two words a block.
//
// A tile of sparse weights ends with 256 bytes of places (codec/int4_sparse.cuh), in which lane l has the 8 bytes at 8 l: word j
// is for blocks 2 j and 2 j + 1.
#pragma once
#include "fault_site.cuh"
#include "ptx/types.cuh"

constexpr int PLANE_BYTES = 512;

// A lane's places of kept channels in `Blocks` neighbouring blocks: nothing for dense weights.
template <bool Sparse, int Blocks>
struct LanePlaces {
    __device__ __forceinline__ void load(const void*) {}
};

template <int Blocks>
struct LanePlaces<true, Blocks> {
    u32 of[(Blocks + 1) / 2];

    __device__ __forceinline__ void load(const void* at) {
        if constexpr (Blocks == 4) {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            of[0] = v.x, of[1] = v.y;
        } else {
            of[0] = *reinterpret_cast<const u32*>(at);
        }
    }
};

// A lane's words of `Blocks` (1, 2 or 4) neighbouring blocks.
template <typename Codec, int Blocks>
struct LaneWords {
    static constexpr int COUNT = Blocks * Codec::BLOCK_WORDS;
    u32 of[COUNT];
    LanePlaces<Codec::SPARSE, Blocks> places;

    // Bytes from a lane's vector in the first plane to the words of block `first`, a multiple of Blocks.
    static __device__ __forceinline__ int offset(int first) {
        if constexpr (Codec::PLANES == 1)
            return first * 4;
        else
            return first / 2 * PLANE_BYTES + first % 2 * 8;
    }
    // Bytes from a tile to the lane's places for block `first`. The tensor cores read the places of odd blocks from lanes 2 and 3 of
    // every four. A lone block gets its own into lanes 0 and 1, so that all warps of a warpgroup name the same lanes.
    static __device__ __forceinline__ int places_offset(int first, int lane) {
        const int from = Blocks == 1 ? lane ^ FAULT_SITE(places_of_lone_block, first % 2 * 2) : lane;
        return Codec::PLANES * PLANE_BYTES + from * 8 + first / 2 * 4;
    }
    // `at` and `places_at`: the words and the places in shared memory.
    __device__ __forceinline__ void load(const void* at, const void* places_at = nullptr) {
        places.load(places_at);
        if constexpr (COUNT == 1) {
            of[0] = *reinterpret_cast<const u32*>(at);
        } else if constexpr (COUNT == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            of[0] = v.x, of[1] = v.y;
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
