"""Schemes in the fewest words."""

from __future__ import annotations

from marlinq.core.scheme import Scheme, integer_element


def scheme(
    group_size: int = 32, *, symmetric: bool = True, bits: int = 4, scale_dtype: str = "float16"
) -> Scheme:
    """An integer scheme."""
    return Scheme(integer_element(bits), group_size, "midpoint" if symmetric else "stored", scale_dtype)
