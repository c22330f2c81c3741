// The products of the persistent kernel: the warps that multiply work off a block's share stage by stage, and leave their sums
// of each tile for the warps that add them (persistent/epilogue.cuh).
#pragma once
#include "codec/int4.cuh"
#include "persistent/activations.cuh"
#include "persistent/digit_unit.cuh"
#include "tma/ring.cuh"

// Slots of sums, each of a set of tiles: handed over by two mbarriers, as a stage of the ring.
template <typename S>
struct Slots {
    static constexpr int STAGES = S::SLOTS, BYTES = S::SLOT_BYTES;
};

// Messages that a block needs before it sends sums, but not before it multiplies: sums of squares of the row that is normalised, or
// words which say that all blocks have reached gate_up.
constexpr int EXPECTED_LETTERS = 5;  // of a lane: 160 words
struct Expected {
    const float* from;
    int count;  // 0: none
    u32 round;
    int channels;  // of the row that is normalised; 0 without a norm
    float eps;

    // The factor of sums: 1 / sqrt(mean square + eps) of the row, or 1 without a norm.
    template <typename AnyLetters>
    __device__ __forceinline__ float root(AnyLetters& letters, int lane) const {
        await(round, letters);
        if (channels == 0) return 1.f;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < EXPECTED_LETTERS; ++i)
            if (32 * i + lane < count) sum += letters.value(i, 0);
        return fast_reciprocal_root(warp_sum(sum) * fast_reciprocal((float)channels) + eps);
    }
};

// The products of one multiplying warp.
template <typename S, typename Codec>
struct Multiplier {
    typedef typename Codec::Element E;

    unsigned char* shared;  // at the ring
    Ring<S> ring;           // at this team's next stage
    Ring<Slots<S>> slots;   // at the next set of tiles
    int team, member, lane;
    int next;  // team of the next stage of all

    __device__ __forceinline__ Multiplier(unsigned char* memory, const Ring<S>& empty, const Ring<Slots<S>>& free_slots, int warp,
                                          int this_lane)
        : shared(memory), ring(empty), slots(free_slots), team(warp / S::TEAM), member(warp % S::TEAM), lane(this_lane), next(0) {
        ring.advance(team);
    }

    __device__ __forceinline__ void release_stage() {
        __syncwarp();
        if (lane == 0) ring.release();
        ring.advance(S::TEAMS);
    }

    // Multiplies all tiles of the block's share by the activations in shared memory. Before it leaves sums, the first warp waits for the
    // messages of `expected`, and writes the norm's factor to roots[slot].
    __device__ __forceinline__ void multiply(const Share<S>& share, const Expected& expected, float* roots) {
        const bool leads = team == 0 && member == 0;
        float root = 0.f;  // not known yet
        Letters<EXPECTED_LETTERS, 1> letters;
#pragma unroll
        for (int i = 0; i < EXPECTED_LETTERS; ++i)
            if (leads && 32 * i < expected.count)
                letters.request(i, expected.from + min(32 * i + lane, expected.count - 1));
            else
                letters.omit(i, expected.round);
        TileSet<S> set;
        const int units = share.units;
#pragma unroll 1
        for (int at = 0; at < share.tiles; at += set.tiles()) {
            set = share.set(at);
            const int tile = member & ((1 << set.log) - 1), slice = member >> set.log;
            int stage = team - next;
            if (stage < 0) stage += S::TEAMS;
            next = (next + set.stages) % S::TEAMS;
            // Teams without a stage of the set have no sums.
            const int contribution = stage >= set.stages ? -1 : (stage << set.slices) + slice;
            DigitSums<Codec> sums;
            sums.clear();
#pragma unroll 1
            for (; stage < set.stages; stage += S::TEAMS) {
                const int unit = set.unit_of(stage) + slice;
                ring.wait_full();
                if (unit < units) add_unit(sums, unit, tile, slice, set.log);
                release_stage();
            }
            // A new barrier counts as past its odd phase.
            barrier_wait(slots.empty + 8 * slots.stage, slots.parity ^ 1);
            if (leads) {
                if (root == 0.f) root = expected.root(letters, lane);
                if (lane == 0) roots[slots.stage] = root;
            }
            if (contribution >= 0) {
                float* out = reinterpret_cast<float*>(shared + S::SLOTS_AT + slots.stage * S::SLOT_BYTES);
                leave(sums, out + ((contribution << set.log) + tile) * 64);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(slots.full + 8 * slots.stage);
            slots.advance();
        }
    }

private:
    // Unit `unit` of the block's, which is the tile's unit `slice` in a stage of 2^log tiles: [slice][row][tile].
    __device__ __forceinline__ void add_unit(DigitSums<Codec>& sums, int unit, int tile, int slice, int log) const {
        const uint4* words = reinterpret_cast<const uint4*>(shared + ring.stage * S::BYTES + (slice << log) * S::UNIT_BYTES + tile * Codec::TILE_BYTES) + lane;
        const u16* scales = reinterpret_cast<const u16*>(shared + S::SCALES_AT + ring.stage * S::SCALE_BYTES +
                                                         (slice << log) * S::UNIT_SCALE_BYTES + tile * 128);
        const auto get_scales = [&](int g) { return load_group_scales(scales + (g << log) * 64, lane); };
        const auto get_zeros = [&](int g) -> Scales<4> {
            if constexpr (S::ZEROS) return load_group_scales(scales + S::ZEROS_AT / 2 + (g << log) * 64, lane);
            const u32 pair = Codec::midpoints();
            return {{pair, pair, pair, pair}};
        };
        const unsigned char* digits = shared + S::ACTIVATIONS_AT + unit * S::DIGIT_STRIDE;
        add_digit_unit<S, Codec>(sums, digits, words, 32 << log, lane, get_scales, get_zeros);
    }
    // Each lane brings the sums of a digit, of eight columns; four lanes share columns, and each of them leaves two.
    __device__ __forceinline__ void leave(const DigitSums<Codec>& sums, float* out) const {
        float four[4], two[2];
        const bool odd = lane & 1, high = lane & 2;
#pragma unroll
        for (int q = 0; q < 4; ++q) four[q] = exchange(sums.total[q][0], sums.total[q][1], odd, 1);
#pragma unroll
        for (int q = 0; q < 2; ++q) two[q] = exchange(four[q], four[q + 2], high, 2);
#pragma unroll
        for (int q = 0; q < 2; ++q) out[16 * (q + 2 * high) + lane / 4 + 8 * odd] = two[q];
    }
    __device__ __forceinline__ float exchange(float first, float second, bool chosen, int distance) const {
        const float mine = chosen ? second : first, theirs = chosen ? first : second;
        return mine + __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(theirs), lane ^ distance));
    }
};
