// Scales and zero points from the order in which Marlin stores them (docs/formats.md).
//
// A lane multiplies with operand A's rows l/4 and l/4 + 8 of 16x16 blocks: it needs the scales of those two columns of the
// weight, side by side in a register, for every block q that it has. Scales of quantisation groups are stored so that a
// lane's eight for a 64-column tile are 16 contiguous bytes; scales of whole channels (a single group) in another order.
#pragma once
#include "fault_site.cuh"
#include "ptx/memory.cuh"

template <int Blocks>
struct Scales {
    u32 pair[Blocks];  // q: the scales (or zero points) of this lane's rows n and n + 8 of block q
};

// Scales of one quantisation group, of the 64-column tile at `tile` in shared memory.
__device__ __forceinline__ Scales<4> load_group_scales(const u16* tile, int lane) {
    const uint4 v = *reinterpret_cast<const uint4*>(tile + FAULT_SITE(scales_of_lane, 8 * (lane / 4)));
    Scales<4> s;
    s.pair[0] = v.x, s.pair[1] = v.y, s.pair[2] = v.z, s.pair[3] = v.w;
    return s;
}

// Address of the scale of this lane's row n of block q, in a tile of scales per channel; the scale of row n + 8 is two behind it.
__device__ __forceinline__ const u16* channel_scale(const u16* tile, int q, int lane) {
    return tile + 32 * (q / 2) + 8 * (lane / 8) + 4 * (q % 2) + lane / 4 % 2;
}

// Scales of whole channels of blocks first .. first + Blocks - 1, from the 64-column tile at `tile` in global memory.
template <int Blocks>
__device__ __forceinline__ Scales<Blocks> load_channel_scales(const u16* tile, int first, int lane) {
    Scales<Blocks> s;
#pragma unroll
    for (int q = 0; q < Blocks; ++q) {
        const u16* p = channel_scale(tile, first + q, lane);
        s.pair[q] = load_u16(p) | load_u16(p + 2) << 16;
    }
    return s;
}

// The same from a tile in shared memory.
__device__ __forceinline__ Scales<4> load_channel_scales_shared(const u16* tile, int lane) {
    Scales<4> s;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const u16* p = channel_scale(tile, q, lane);
        s.pair[q] = (u32)p[0] | (u32)p[2] << 16;
    }
    return s;
}
