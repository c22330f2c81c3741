// The product of a unit's words with digits that lie in shared memory (mma/integer_digits.cuh), for a single row.
#pragma once
#include "mma/integer_digits.cuh"
#include "persistent/shape.cuh"
#include "scale/stored_order.cuh"

// `words` are this lane's in the first of eight k16 rows, `stride` vectors from one row to the next. All words are requested
// before the first is used, and even and odd rows have sums of their own, so that products wait less for each other.
template <typename S, typename Codec, typename GetScales, typename GetZeros>
__device__ __forceinline__ void add_digit_unit(DigitSums<Codec>& sums, const unsigned char* unit, const uint4* words, int stride, int lane,
                                               GetScales scales, GetZeros zeros) {
    typedef typename Codec::Element E;
    constexpr int GROUP_ROWS = S::QUANT_GROUP_ROWS;
    constexpr int CHAINS = GROUP_ROWS >= 4 ? 2 : 1;
    // Column l / 4 of operand B: digit l / 8, at the bytes of its half.
    const uint4* mine = reinterpret_cast<const uint4*>(unit) + (lane / 8 * 4 + lane % 4) * 2;
    const u32 first = lane / 4 % 2 ? 0x1404 : 0x4140, second = lane / 4 % 2 ? 0x3424 : 0x4342;
    uint4 row_words[S::UNIT_ROWS];
#pragma unroll
    for (int r = 0; r < S::UNIT_ROWS; ++r) row_words[r] = words[r * stride];
    const uint4 low = mine[0], high = mine[1];
    const u32 digits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const float weight = reinterpret_cast<const float*>(unit + S::DIGIT_UNIT_AT)[lane % 4];
    const u32* plain = reinterpret_cast<const u32*>(unit + S::PLAIN_AT) + lane % 4;
#pragma unroll
    for (int g = 0; g < S::UNIT_GROUPS; ++g) {
        const u32 activations = plain[4 * g];
        const Scales<4> scale = scales(g);
        // For symmetric weights the sums begin at the negative of 8 times the sum of the activations.
        const u32 begin = S::ZEROS ? MAGIC_BITS : MAGIC_BITS - 8 * activations;
        u32 made[CHAINS][2][4];
#pragma unroll
        for (int c = 0; c < CHAINS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) made[c][0][i] = made[c][1][i] = c == 0 ? begin : 0;
#pragma unroll
        for (int i = 0; i < GROUP_ROWS; ++i) {
            const int row = g * GROUP_ROWS + i;
            const u32 b[2] = {permute_bytes(digits[row], 0, first), permute_bytes(digits[row], 0, second)};
            u32 a[2][4];
            Codec::bytes(row_words[row].x, row_words[row].y, a[0]);
            Codec::bytes(row_words[row].z, row_words[row].w, a[1]);
            multiply_bytes(made[i % CHAINS][0], a[0], b);
            multiply_bytes(made[i % CHAINS][1], a[1], b);
        }
        Scales<4> zero;
        if constexpr (S::ZEROS) zero = zeros(g);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float by[2] = {widen_half<E, 0>(scale.pair[q]), widen_half<E, 1>(scale.pair[q])};
            float offset[2] = {};
            if constexpr (S::ZEROS) offset[0] = widen_half<E, 0>(zero.pair[q]), offset[1] = widen_half<E, 1>(zero.pair[q]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = q % 2 * 2 + h;
                u32 all = made[0][q / 2][at];
                if constexpr (CHAINS == 2) all += made[1][q / 2][at];
                float sum = __uint_as_float(all) - MAGIC;
                if (S::ZEROS) sum = fmaf(-offset[h], (float)(int)activations, sum);
                sums.total[q][h] = fmaf(sum, by[h] * weight, sums.total[q][h]);
            }
        }
    }
}
