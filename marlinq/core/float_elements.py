"""Element types of low-precision floats: E4M3 (FP8) and E2M1 (FP4).

Importing this module registers them.
"""

from __future__ import annotations

import math

from marlinq.core.scheme import Element, register_element


def _values(exponent_bits: int, mantissa_bits: int, bias: int, nan: int | None) -> tuple[float, ...]:
    """The value of every code: sign bit, exponent, mantissa; subnormal where the exponent is 0.

    ``nan`` is the magnitude that stands for NaN, or None.
    """
    magnitudes = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        leading = (1 << mantissa_bits) if exponent else 0
        value = (leading + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        magnitudes.append(math.nan if code == nan else value)
    return (*magnitudes, *(-value for value in magnitudes))


E4M3 = register_element(Element("fp8_e4m3", 8, _values(4, 3, bias=7, nan=0x7F)))
"""FP8 without infinities: the largest value is 448; codes 0x7F and 0xFF are NaN."""

E2M1 = register_element(Element("fp4_e2m1", 4, _values(2, 1, bias=1, nan=None)))
"""FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
