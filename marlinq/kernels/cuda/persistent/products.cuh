// The products of the persistent kernel: the warps that multiply work off a block's share stage by stage, and leave their sums
// of each tile for the warps that add them (persistent/epilogue.cuh).
#pragma once
#include "codec/int4.cuh"
#include "mma/quant_group_sums.cuh"
#include "persistent/activations.cuh"
#include "tma/ring.cuh"

// Slots of sums, each of two tiles: handed over by two mbarriers, as a stage of the ring.
template <typename S>
struct Slots {
    static constexpr int STAGES = S::SLOTS, BYTES = S::SLOT_BYTES;
};

// A walk of one warp.
template <typename S, typename Codec>
struct Multiplier {
    typedef typename Codec::Element E;
    typedef QuantGroupSums<Codec, 1, S::ZEROS, true> GroupSums;

    unsigned char* shared;  // at the ring
    Ring<S> ring;           // at this team's next stage
    Ring<Slots<S>> slots;   // at the next pair of tiles
    int team, member, lane;
    int next;      // team of the next stage of all
    float factor;  // of a single row's sums

    __device__ __forceinline__ Multiplier(unsigned char* memory, const Ring<S>& empty, const Ring<Slots<S>>& free_slots, int warp,
                                          int this_lane)
        : shared(memory), ring(empty), slots(free_slots), team(warp / S::TEAM), member(warp % S::TEAM), lane(this_lane), next(0), factor(1.f) {
        ring.advance(team);
    }

    __device__ __forceinline__ void release_stage() {
        __syncwarp();
        if (lane == 0) ring.release();
        ring.advance(S::TEAMS);
    }

    // Until all slots are free; when all warps have left the sums of the tiles before.
    __device__ __forceinline__ void wait_for_slots() const {
        Ring<Slots<S>> slot = slots;
        for (int i = 0; i < S::SLOTS; ++i, slot.advance()) wait_for_slot(slot);
    }

    // All tiles of the block's share, with the activations that are in shared memory.
    __device__ __forceinline__ void multiply(const Share<S>& share, int rows) {
        int tile = 0, stage = team - next;
        if (stage < 0) stage += S::TEAMS;
        next = (next + share.tiles * share.stages) % S::TEAMS;
        Ring<Slots<S>> slot = slots;
        const auto next_tile = [&] {
            stage -= share.stages;
            if (tile++ % 2 == 1) slot.advance();
        };
        while (stage >= share.stages) next_tile();
        while (tile < share.tiles) {
            const int contribution = stage * S::TEAM + member;
            typename Sums<S::DIGITS>::Type sums;
            sums.clear();
#pragma unroll 1
            for (; stage < share.stages; stage += S::TEAMS) {
                ring.wait_full();
                const int unit = stage * S::TEAM + member;
                if (unit < share.units && !LAB_NO_PRODUCTS) add_unit(sums, unit);
                release_stage();
            }
            wait_for_slot(slot);
            float* out = reinterpret_cast<float*>(shared + S::SLOTS_AT + slot.stage * S::SLOT_BYTES + tile % 2 * S::TILE_SUM_BYTES) +
                         contribution * S::ROWS * S::PITCH;
            leave(sums, out, rows);
            __syncwarp();
            // Teams without a stage of the tile are counted by the first one, and the tile that a last one lacks by that one.
            if (lane == 0) {
                const int absent = contribution < S::TEAM ? S::TEAMS - min(S::TEAMS, share.stages) : 0;
                const int arrivals = (absent + 1) * (tile % 2 == 0 && tile + 1 == share.tiles ? 2 : 1);
                for (int i = 0; i < arrivals; ++i) barrier_arrive(slot.full + 8 * slot.stage);
            }
            do next_tile();
            while (stage >= share.stages);
        }
        for (int i = 0; i < share.tiles; i += 2) slots.advance();
    }

private:
    template <bool DIGITS, int = 0>
    struct Sums {
        typedef DigitSums<Codec> Type;
    };
    template <int ANY>
    struct Sums<false, ANY> {
        typedef Accumulators<1> Type;
    };

    __device__ __forceinline__ void wait_for_slot(const Ring<Slots<S>>& slot) const {
        // A new barrier counts as past its odd phase.
        barrier_wait(slot.empty + 8 * slot.stage, slot.parity ^ 1);
    }
    __device__ __forceinline__ const unsigned char* stage_memory() const { return shared + ring.stage * S::BYTES; }
    __device__ __forceinline__ const u16* scales(int quant_group) const {
        return reinterpret_cast<const u16*>(shared + S::SCALES_AT + ring.stage * S::SCALE_BYTES + member * S::UNIT_SCALE_BYTES +
                                            quant_group * 128);
    }
    __device__ __forceinline__ Scales<4> zeros(int quant_group) const {
        if constexpr (S::ZEROS) return load_group_scales(scales(quant_group) + S::ZEROS_AT / 2, lane);
        const u32 pair = Codec::midpoints();
        return {{pair, pair, pair, pair}};
    }

    __device__ __forceinline__ void add_unit(DigitSums<Codec>& sums, int unit) const {
        const unsigned char* digits = shared + S::ACTIVATIONS_AT + unit * S::DIGIT_STRIDE;
        const u32 plain = reinterpret_cast<const u32*>(digits + S::PLAIN_AT)[lane / 4 / S::QUANT_GROUP_ROWS * 4 + lane % 4];
        const float weight = reinterpret_cast<const float*>(digits + S::DIGIT_UNIT_AT)[lane % 4];
        const uint4* words = reinterpret_cast<const uint4*>(stage_memory() + member * S::UNIT_BYTES) + lane;
        sums.template multiply<S::QUANT_GROUP_ROWS>(
            words, reinterpret_cast<const u32*>(digits), weight, plain, lane,
            [&](int g) { return load_group_scales(scales(g), lane); }, [&](int g) { return zeros(g); });
    }
    __device__ __forceinline__ void add_unit(Accumulators<1>& sums, int unit) const {
        const u32 activations = shared_address(shared) + S::ACTIVATIONS_AT + unit * 2 * S::SLAB_BYTES;
        const uint4* words = reinterpret_cast<const uint4*>(stage_memory() + member * S::UNIT_BYTES) + lane;
        GroupSums group_sums;
#pragma unroll
        for (int i = 0; i < S::UNIT_ROWS; i += 2) {
            const int quant_group = i / S::QUANT_GROUP_ROWS;
            if (i % S::QUANT_GROUP_ROWS == 0) group_sums.clear();
            // Rows past the batch at most repeat others; their sums are not kept.
            const int m = lane % 8 % S::ROWS, piece = 2 * (i % 4) + GroupSums::piece(lane);
            u32 r[4];
            load_matrix_x4(r, activations + i / 4 * S::SLAB_BYTES + m * 128 + ((piece ^ m) * 16));
            const u32 fragments[1][2][2] = {{{r[0], r[1]}, {r[2], r[3]}}};
            group_sums.add(sums, words[i * 32], words[(i + 1) * 32], fragments);
            if (i % S::QUANT_GROUP_ROWS == S::QUANT_GROUP_ROWS - 2)
                group_sums.close(sums, load_group_scales(scales(quant_group), lane), zeros(quant_group));
        }
    }

    // Each lane brings the sums of a digit, of eight columns; four lanes share columns, and each of them leaves two.
    __device__ __forceinline__ void leave(const DigitSums<Codec>& sums, float* out, int) const {
        float four[4], two[2];
        const bool odd = lane & 1, high = lane & 2;
#pragma unroll
        for (int q = 0; q < 4; ++q) four[q] = exchange(sums.total[q][0], sums.total[q][1], odd, 1);
#pragma unroll
        for (int q = 0; q < 2; ++q) two[q] = exchange(four[q], four[q + 2], high, 2);
#pragma unroll
        for (int q = 0; q < 2; ++q) out[16 * (q + 2 * high) + lane / 4 + 8 * odd] = two[q] * factor;
    }
    __device__ __forceinline__ float exchange(float first, float second, bool chosen, int distance) const {
        const float mine = chosen ? second : first, theirs = chosen ? first : second;
        return mine + __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(theirs), lane ^ distance));
    }
    __device__ __forceinline__ void leave(const Accumulators<1>& sums, float* out, int rows) const {
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = 2 * (lane % 4) + i % 2;
                if (m < rows) out[m * S::PITCH + 16 * q + lane / 4 + 8 * (i / 2)] = sums.value[q][0][i];
            }
    }
};
