// Sums of a quantisation group in a warp, for the kernels built on mma.sync: how words are dequantised, and when scales multiply.
#pragma once
#include "fault_site.cuh"
#include "codec/lane_words.cuh"
#include "mma/multiply_sparse.cuh"
#include "scale/stored_order.cuh"

template <int BlocksM>
struct Accumulators {
    float value[4][BlocksM][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int b = 0; b < BlocksM; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) value[q][b][i] = 0.f;
    }
};

// Three ways:
//
//   ScaleSums, one block of eight batch rows   products of codes alone (int4_codes.cuh) and of the activations alone; the
//                                              sums get zero points and scales when the quantisation group ends
//   ScaleSums, larger batches                  products of codes minus zero points, whose sums are scaled
//   otherwise                                  products of weights: no second set of accumulators
//
// They take five, nine and thirteen instructions a word. But the first also takes products of the activations alone and one
// more set of accumulators, too many registers for larger batches.
template <typename Codec, int BlocksM, bool Zeros, bool ScaleSums>
struct QuantGroupSums {
    typedef typename Codec::Element E;
    static constexpr bool CODES = Codec::SUMS_CODES && ScaleSums && BlocksM == 1;

    // Kinds of codes, with separate sums.
    static __device__ constexpr int kinds() {
        if constexpr (CODES)
            return Codec::KINDS;
        else
            return 1;
    }
    static constexpr int KINDS = kinds();
    static constexpr int ROWS = 32 / Codec::ROW_CHANNELS;  // stored rows that are added at a time
    // Factor of the sums of codes.
    static __device__ constexpr float unit() {
        if constexpr (CODES)
            return Codec::UNIT;
        else
            return 1.f;
    }

    Accumulators<BlocksM> sums[KINDS];
    float plain[BlocksM][4];  // sums of the activations alone, times eight where no zero points are stored
    Scales<4> scale, zero;    // used where weights are scaled or zero points subtracted from them

    // The 16-byte piece of two rows' activations that matrix lane / 8 is loaded from. A row's B fragment is its two pieces;
    // for codes, whose kinds are channels apart, a fragment is one kind's pieces of both rows.
    static __device__ __forceinline__ int piece(int lane) { return CODES ? FAULT_SITE(piece_of_codes, lane / 8 % 2 * 2 + lane / 16) : lane / 8; }

    // Before a quantisation group's first row.
    __device__ __forceinline__ void begin(const Scales<4>& scales, const Scales<4>& zeros) { scale = scales, zero = zeros; }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int kind = 0; kind < KINDS; ++kind) sums[kind].clear();
#pragma unroll
        for (int b = 0; b < BlocksM; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) plain[b][i] = 0.f;
    }

    // Words of 32 channels, and their B fragments of each block of eight batch rows, [block][half][register].
    __device__ __forceinline__ void add(Accumulators<BlocksM>& total, const LaneWords<Codec, 4> (&words)[ROWS],
                                        const u32 (&x)[BlocksM][2][2]) {
        if constexpr (CODES) {
            constexpr u32 ALONE = Zeros ? Codec::ONES_AS_CODES : Codec::EIGHTS_AS_CODES;
            const u32 alone[4] = {ALONE, ALONE, ALONE, ALONE};
#pragma unroll
            for (int f = 0; f < 2; ++f) E::multiply_accumulate(plain[0], alone, x[0][f][0], x[0][f][1]);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                u32 pairs[2][2][2];
#pragma unroll
                for (int row = 0; row < 2; ++row) Codec::codes(FAULT_SITE(words_of_pair, words[row].of[q]), pairs[row]);
#pragma unroll
                for (int kind = 0; kind < 2; ++kind) {
                    const u32 a[4] = {pairs[0][kind][0], pairs[0][kind][1], pairs[1][kind][0], pairs[1][kind][1]};
                    E::multiply_accumulate(sums[kind % KINDS].value[q][0], a, FAULT_SITE(fragments_by_kind, x[0][kind][0], x[0][kind][1]));
                }
            }
        } else {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) add_row(total, words[row], row, x);
        }
    }
    // Adds the products of stored row `row` of the 32 channels; its codes are dequantised first.
    __device__ __forceinline__ void add_row(Accumulators<BlocksM>& total, const LaneWords<Codec, 4>& words, int row,
                                            const u32 (&x)[BlocksM][2][2]) {
        Accumulators<BlocksM>& target = ScaleSums ? sums[0] : total;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            u32 a[4];
            const auto offsets = Zeros ? Codec::offsets(zero.pair[q]) : Codec::offsets();
            if (ScaleSums)
                Codec::dequantize(words.block(q), a, offsets);
            else
                Codec::weights(words.block(q), a, offsets, scale.pair[q]);
#pragma unroll
            for (int b = 0; b < BlocksM; ++b) {
                float (&d)[4] = target.value[q][b];
                if constexpr (Codec::SPARSE) {
                    const u32 all[4] = {x[b][0][0], x[b][0][1], x[b][1][0], x[b][1][1]};
                    const u32 places = FAULT_SITE(places_of_block, words.places.of[q / 2]);
                    if (q % 2 == 0)
                        multiply_sparse<E, 0>(d, a, all, places);
                    else
                        multiply_sparse<E, FAULT_SITE(sparse_selector, 1)>(d, a, all, places);
                } else {
                    E::multiply_accumulate(d, a, x[b][row][0], x[b][row][1]);
                }
            }
        }
    }

    // After a quantisation group's last row: total += scales * sums.
    __device__ __forceinline__ void close(Accumulators<BlocksM>& total, const Scales<4>& scales, const Scales<4>& zeros) const {
        if (!ScaleSums) return;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float by[2] = {widen_half<E, 0>(scales.pair[q]) * unit(),
                                 widen_half<E, 1>(scales.pair[q]) * unit()};
            float offset[2];
            if constexpr (CODES && Zeros) {
                offset[0] = FAULT_SITE(zero_of_row, widen_half<E, 0>(zeros.pair[q])) + Codec::BASE;
                offset[1] = widen_half<E, 1>(zeros.pair[q]) + Codec::BASE;
            }
#pragma unroll
            for (int b = 0; b < BlocksM; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float sum = sums[0].value[q][b][i];
                    if constexpr (KINDS == 2) sum = fmaf(sums[1].value[q][b][i], Codec::SECOND, sum);
                    if (CODES) sum = Zeros ? fmaf(-offset[i / 2], plain[b][i], sum) : sum - plain[b][i];
                    total.value[q][b][i] = fmaf(by[i / 2], sum, total.value[q][b][i]);
                }
        }
    }
};
