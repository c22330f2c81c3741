// Arithmetic on registers: bits (PTX ISA, lop3, prmt, mov), conversions (cvt) and pairs of 16-bit floats (sub, mul, fma).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "floats.h"
#include "instructions.h"
#include "machine.h"

namespace emulation {

namespace {

template <Element ELEMENT>
struct Float;
template <>
struct Float<Element::HALF> : Half {};
template <>
struct Float<Element::BFLOAT16> : Bfloat16 {};

// In double, so that every result is rounded once.
template <Element ELEMENT, typename OPERATION>
u32 each_half(OPERATION operation, u32 a, u32 b, u32 c = 0) {
    typedef Float<ELEMENT> F;
    u32 result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto part = [&](u32 pair) { return static_cast<double>(F::widen(static_cast<u16>(pair >> shift))); };
        result |= static_cast<u32>(F::narrow(operation(part(a), part(b), part(c)))) << shift;
    }
    return result;
}

}  // namespace

void combine_bits(Output<u32> result, u32 a, u32 b, u32 c, u32 table) {
    u32 bits = 0;
    // Bit i of the table is the result for the inputs a, b, c that spell i, a being the highest.
    for (u32 i = 0; i < 8; ++i)
        if (table >> i & 1) bits |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    result.set(bits);
}

void permute_bytes(Output<u32> result, u32 a, u32 b, u32 selector) {
    const u64 source = a | static_cast<u64>(b) << 32;
    u32 bits = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 byte = static_cast<u32>(source >> 8 * (selector >> 4 * i & 7)) & 0xff;
        // The selector's highest bit asks for eight copies of the byte's sign.
        bits |= (selector >> 4 * i & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    result.set(bits);
}

void dot_bytes(Output<u32> result, u32 a, u32 b, u32 c) {
    for (u32 shift = 0; shift < 32; shift += 8)
        c += static_cast<u32>(static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift));
    result.set(c);
}

void byte_distances(Output<u32> result, u32 a, u32 b, u32 c) {
    if (c) fail("vabsdiff4 with a third operand that is not 0");
    u32 bits = 0;
    for (u32 shift = 0; shift < 32; shift += 8) {
        const int difference = static_cast<int>(a >> shift & 0xff) - static_cast<int>(b >> shift & 0xff);
        bits |= static_cast<u32>(std::abs(difference)) << shift;
    }
    result.set(bits);
}

// To the nearest, ties to even; what no int holds becomes the nearest one, and what is undefined zero.
void round_to_int(Output<u32> result, float value) {
    const double rounded = std::nearbyint(static_cast<double>(value));
    const double least = std::numeric_limits<int32_t>::min(), most = std::numeric_limits<int32_t>::max();
    result.set(std::isnan(value) ? 0u : static_cast<u32>(static_cast<int32_t>(std::clamp(rounded, least, most))));
}

void truncate_to_u16(Output<u16> result, u32 value) { result.set(static_cast<u16>(value)); }

void move_halves(const Array<Output<u16>, 2>& halves, u32 pair) {
    halves[0].set(static_cast<u16>(pair)), halves[1].set(static_cast<u16>(pair >> 16));
}
void move_halves(Output<u32> pair, const Array<Output<u16>, 2>& halves) {
    pair.set(static_cast<u32>(*halves[0].home | *halves[1].home << 16));
}

template <Element ELEMENT>
void widen(Output<float> result, u16 value) {
    result.set(Float<ELEMENT>::widen(value));
}

template <Element ELEMENT>
void narrow_pair(Output<u32> result, float high, float low) {
    result.set(Float<ELEMENT>::narrow(low) | static_cast<u32>(Float<ELEMENT>::narrow(high)) << 16);
}

void narrow_pair_to_e4m3(Output<u16> result, float high, float low) {
    result.set(static_cast<u16>(narrow_to_e4m3(low) | narrow_to_e4m3(high) << 8));
}

template <Element ELEMENT>
void add_pairs(Output<u32> result, u32 a, u32 b) {
    result.set(each_half<ELEMENT>([](double x, double y, double) { return x + y; }, a, b));
}

template <Element ELEMENT>
void subtract_pairs(Output<u32> result, u32 a, u32 b) {
    result.set(each_half<ELEMENT>([](double x, double y, double) { return x - y; }, a, b));
}

template <Element ELEMENT>
void multiply_pairs(Output<u32> result, u32 a, u32 b) {
    result.set(each_half<ELEMENT>([](double x, double y, double) { return x * y; }, a, b));
}

template <Element ELEMENT>
void multiply_add_pairs(Output<u32> result, u32 a, u32 b, u32 c) {
    result.set(each_half<ELEMENT>([](double x, double y, double z) { return x * y + z; }, a, b, c));
}

#define FOR_EACH_ELEMENT(ELEMENT)                                                             \
    template void widen<ELEMENT>(Output<float>, u16);                                  \
    template void narrow_pair<ELEMENT>(Output<u32>, float, float);              \
    template void add_pairs<ELEMENT>(Output<u32>, u32, u32);                    \
    template void subtract_pairs<ELEMENT>(Output<u32>, u32, u32);               \
    template void multiply_pairs<ELEMENT>(Output<u32>, u32, u32);               \
    template void multiply_add_pairs<ELEMENT>(Output<u32>, u32, u32, u32);
FOR_EACH_ELEMENT(Element::HALF)
FOR_EACH_ELEMENT(Element::BFLOAT16)

}  // namespace emulation
