// float16 and bfloat16 in integer arithmetic, since compilers differ in which of them they know.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulation {

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// `value` rounded to nearest even to a float with that many bits, subnormals and infinities included.
template <int EXPONENT, int MANTISSA>
uint16_t round_to_16_bits(double value) {
    constexpr int BIAS = (1 << (EXPONENT - 1)) - 1, CUT = 52 - MANTISSA;
    constexpr uint64_t INFINITE = ((1 << EXPONENT) - 1) << MANTISSA;
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    const uint64_t sign = bits >> 63 << 15, magnitude = bits << 1 >> 1;
    const int exponent = static_cast<int>(magnitude >> 52) - 1023;
    if (std::isnan(value)) return 0x7fff;  // the canonical NaN of cvt
    if (exponent > BIAS) return static_cast<uint16_t>(sign | INFINITE);
    if (exponent < 1 - BIAS)  // subnormal: a count of the smallest unit
        return static_cast<uint16_t>(
            sign | static_cast<uint64_t>(std::nearbyint(std::ldexp(std::fabs(value), BIAS - 1 + MANTISSA))));
    // A carry out of the mantissa lands in the exponent, where it belongs, up to infinity.
    const uint64_t rounded = (magnitude + (1ull << (CUT - 1)) - 1 + (magnitude >> CUT & 1)) >> CUT;
    return static_cast<uint16_t>(sign | (rounded - (static_cast<uint64_t>(1023 - BIAS) << MANTISSA)));
}

struct Half {
    static float widen(uint16_t bits) {
        const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        float magnitude = float_of(static_cast<uint32_t>(exponent + 112) << 23 | mantissa << 13);
        if (exponent == 0) magnitude = std::ldexp(static_cast<float>(mantissa), -24);
        if (exponent == 31) magnitude = mantissa ? NAN : INFINITY;
        return bits & 0x8000 ? -magnitude : magnitude;
    }
    static uint16_t narrow(double value) { return round_to_16_bits<5, 10>(value); }
};

struct Bfloat16 {
    static float widen(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
    static uint16_t narrow(double value) { return round_to_16_bits<8, 7>(value); }
};

// Sign, four bits of exponent and three of mantissa; 0x7f and 0xff are NaN.
inline float widen_e4m3(uint8_t bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float magnitude = exponent ? std::ldexp(static_cast<float>(8 + mantissa), exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
    return bits & 0x80 ? -magnitude : magnitude;
}

// `value` rounded to nearest even to sign, four bits of exponent and three of mantissa; beyond 448 it is 448.
inline uint8_t narrow_to_e4m3(float value) {
    if (std::isnan(value)) return 0x7f;
    const int sign = std::signbit(value) ? 0x80 : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude >= 448) return static_cast<uint8_t>(sign | 0x7e);
    // Subnormal numbers count units of 2^-9. A carry out of the mantissa lands in the exponent, where it belongs.
    const int exponent = magnitude < 0x1p-6 ? -6 : std::ilogb(magnitude);
    const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
    return static_cast<uint8_t>(sign | (units + (magnitude < 0x1p-6 ? 0 : (exponent + 6) * 8)));
}

}  // namespace emulation
