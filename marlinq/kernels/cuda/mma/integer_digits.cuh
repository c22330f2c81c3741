// Integer products of one batch row, for the stream kernel.
//
// With float products a word takes five instructions and one and a quarter mma.sync (quant_group_sums.cuh), and a single row
// uses one of the eight columns of operand B. Integer products use all eight: a word takes two instructions and half an
// mma.m16n8k32.
//
//   A   a word's nibbles in place, as unsigned bytes (codec/int4_bytes.cuh)
//   B   the activations as 32-bit integers, in four signed digits of 8 bits. Column 2 d + h holds digit d at the bytes of
//       weight column n + 8 h and zeros at the others, so that the two weight columns of a register have sums of their own.
//
// Integers. A chunk's activations are multiplied by a power of two that brings the largest to 2^29 .. 2^30 (those of the
// upper eight channels to a sixteenth of that, since their nibbles count 16 times as much) and rounded. The rounding error is
// zero unless an activation is 2^15 times smaller than the largest one and has bits that low. Nonzero errors are converted to
// digits and multiplied in the same way, until all are zero. So products, and the sums of a quantisation group's digits, are exact
// for any activations, except bits below 2^-122. An infinite or NaN activation makes the row NaN.
//
// Lanes. Lane l makes the digits of four channels of k16 row l / 4 of the chunk, {2 (l%4) + 0, 1, 8, 9}, and stores them in
// shared memory for the eight lanes with the same l % 4. It accumulates digit l % 4 of columns 16 q + l / 4 + 8 h.
#pragma once
#include "fault_site.cuh"
#include "element/pair.cuh"
#include "ptx/bits.cuh"
#include "ptx/matrix.cuh"

constexpr int DIGIT_BYTES = 512;  // bytes of a warp's digits of a chunk, [digit][l % 4][row] words of four channels

// Activations below 2^(LEAST_EXPONENT - 127) have no power of two of their own: its inverse would not be a float.
constexpr u32 LEAST_EXPONENT = 30, NOT_FINITE = 255;
constexpr u32 MAGIC_BITS = 0x4b400000u;  // of 3 * 2^22: a float whose last place is one
constexpr float MAGIC = 12582912.f;

template <typename Codec>
struct DigitSums {
    typedef typename Codec::Element E;

    float total[4][2];  // q, h

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int q = 0; q < 4; ++q) total[q][0] = total[q][1] = 0.f;
    }

    // Adds a chunk of eight k16 rows of words. `x` are its activations, `words` this lane's in the first row, 32 vectors from one row
    // to the next, `digits` the warp's memory. `scales` and `zeros` give those of a quantisation group of QuantGroupRows rows.
    template <int QuantGroupRows, typename GetScales, typename GetZeros>
    __device__ __forceinline__ void add(const u16* x, const uint4* words, u32* digits, int lane, GetScales scales,
                                        GetZeros zeros) {
        const u32* pairs = reinterpret_cast<const u32*>(x + lane / 4 * 16 + lane % 4 * 2);
        const u32 lower = pairs[0], upper = pairs[4];
        float left[4] = {widen_half<E, 0>(lower), widen_half<E, 1>(lower), widen_half<E, 0>(upper), widen_half<E, 1>(upper)};
        bool lacks;
        do {
            const u32 exponent = max(largest(left) >> 23, LEAST_EXPONENT);
            float unit;
            const u32 plain = to_digits<QuantGroupRows>(left, exponent, digits, lane, unit);
            lacks = exponent != LEAST_EXPONENT && exponent != NOT_FINITE &&
                    (left[0] != 0.f || left[1] != 0.f || left[2] != 0.f || left[3] != 0.f);
            multiply<QuantGroupRows>(words, digits, unit, plain, lane, scales, zeros);
            // The vote comes after the products: waiting for it before them cost 3 % of a launch.
        } while (FAULT_SITE(digits_lacking, __any_sync(0xffffffffu, lacks)));
    }

    // The sums of columns 16 q + l / 4 + 8 h, in all lanes of l / 4.
    __device__ __forceinline__ float sum(int q, int h, int lane) const {
        float value = total[q][h];
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2)
            value += __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(value), lane ^ distance));
        return value;
    }

    // The steps of `add`, for callers that multiply several words with the same digits.

    // The bits of the warp's largest absolute value; more than those of infinity if one is undefined.
    static __device__ __forceinline__ u32 largest(const float (&values)[4]) {
        u32 mine = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) mine = max(mine, __float_as_uint(values[i]) & 0x7fffffffu);
        return warp_max(mine);
    }

    // Stores the digits, leaves their rounding error in `left` and the weight of this lane's digit in `unit`. Returns that
    // digit's sum over the activations of the quantisation group that row l / 4 belongs to.
    template <int QuantGroupRows>
    static __device__ __forceinline__ u32 to_digits(float (&left)[4], u32 exponent, u32* digits, int lane, float& unit) {
        u32 number[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 sixteenth = FAULT_SITE(upper_channels, i < 2 ? 0 : 4);
            const float factor = __uint_as_float((283 - sixteenth - exponent) << 23);
            const float inverse = __uint_as_float((exponent - 29 + sixteenth) << 23);
            const int rounded = round_to_int(left[i] * factor);
            left[i] = fmaf(-(float)rounded, inverse, left[i]);
            number[i] = (u32)rounded + 0x00808080u;  // digits, the lower three offset by 128
        }
        const u32 low[2] = {permute_bytes<0x5140>(number[0], number[1]), permute_bytes<0x5140>(number[2], number[3])};
        const u32 high[2] = {permute_bytes<0x7362>(number[0], number[1]), permute_bytes<0x7362>(number[2], number[3])};
        u32* mine = digits + lane % 4 * 8 + lane / 4;
        FAULT_SITE(digits_free, __syncwarp();)  // the chunk before has been read
        const u32 words[4] = {permute_bytes<0x5410>(low[0], low[1]) ^ 0x80808080u, permute_bytes<0x7632>(low[0], low[1]) ^ 0x80808080u,
                              permute_bytes<0x5410>(high[0], high[1]) ^ 0x80808080u, permute_bytes<0x7632>(high[0], high[1])};
#pragma unroll
        for (int d = 0; d < 4; ++d) mine[32 * d] = words[d];
        FAULT_SITE(digits_stored, __syncwarp();)
        unit = exponent == NOT_FINITE ? __uint_as_float(0x7fffffffu) : __uint_as_float((exponent - 29 + FAULT_SITE(digit_power, 8 * (lane % 4))) << 23);

        // Sums over the four lanes of a row, each of which keeps one digit, then over the quantisation group's rows.
        u32 plain[4];
#pragma unroll
        for (int d = 0; d < 4; ++d) plain[d] = dot_bytes(words[d], 0x10100101u);
#pragma unroll
        for (int d = 0; d < 4; d += 2) plain[d] = exchange_add(plain[d], plain[d + 1], lane, 1);
        u32 sum = exchange_add(plain[0], plain[2], lane, 2);
#pragma unroll
        for (int distance = 4; distance < 4 * QuantGroupRows; distance *= 2) sum += __shfl_sync(0xffffffffu, sum, lane ^ distance);
        return sum;
    }

    // Bit `distance` of the lane number chooses one of two sums; adds the share of the lane at that distance.
    static __device__ __forceinline__ u32 exchange_add(u32 first, u32 second, int lane, int distance) {
        const bool chosen = lane & distance;
        return (chosen ? second : first) + __shfl_sync(0xffffffffu, chosen ? first : second, lane ^ distance);
    }

    template <int QuantGroupRows, typename GetScales, typename GetZeros>
    __device__ __forceinline__ void multiply(const uint4* words, const u32* digits, float unit, u32 plain, int lane,
                                             GetScales scales, GetZeros zeros) {
        // Column l / 4 of operand B: digit l / 8, at the bytes of its half.
        const uint4* mine = reinterpret_cast<const uint4*>(digits + (lane / 8 * 4 + lane % 4) * 8);
        const u32 first = FAULT_SITE(digit_columns, lane / 4 % 2 ? 0x1404 : 0x4140), second = lane / 4 % 2 ? 0x3424 : 0x4342;
        u32 sums[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = mine[half];
            const u32 row_digits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int row = 4 * half + r;
                if (row % QuantGroupRows == 0) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[0][i] = sums[1][i] = MAGIC_BITS;
                }
                const u32 b[2] = {permute_bytes(row_digits[r], 0, first), permute_bytes(row_digits[r], 0, second)};
                const uint4 w = words[row * 32];
                u32 a[2][4];
                Codec::bytes(w.x, w.y, a[0]);
                Codec::bytes(w.z, w.w, a[1]);
                multiply_bytes(sums[0], a[0], b);
                multiply_bytes(sums[1], a[1], b);
                if (row % QuantGroupRows == QuantGroupRows - 1) {
                    const int quant_group = row / QuantGroupRows;
                    const u32 activations =
                        QuantGroupRows == 8 ? plain : __shfl_sync(0xffffffffu, plain, FAULT_SITE(digits_of_group, quant_group * QuantGroupRows * 4 + lane % 4));
                    close(sums, (float)(int)activations, unit, scales(quant_group), zeros(quant_group));
                }
            }
        }
    }

    // After a quantisation group's last row.
    template <typename S>
    __device__ __forceinline__ void close(const u32 (&sums)[2][4], float activations, float unit, const S& scale, const S& zero) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float offset[2] = {widen_half<E, 0>(zero.pair[q]), widen_half<E, 1>(zero.pair[q])};
            const float by[2] = {widen_half<E, 0>(scale.pair[q]), widen_half<E, 1>(scale.pair[q])};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float sum = fmaf(-offset[h], activations, __uint_as_float(sums[q / 2][q % 2 * 2 + h]) - MAGIC);
                total[q][h] = fmaf(sum, by[h] * unit, total[q][h]);
            }
        }
    }
};
