"""How much memory the blocks of a launch need to hand over sums to each other."""

from __future__ import annotations

from typing import NamedTuple


class Handover(NamedTuple):
    """Sizes of what a launch needs.

    Attributes:
        floats: float32 sums, uninitialised.
        flags: words of 32 bits, which are zero.
    """

    floats: int
    flags: int
