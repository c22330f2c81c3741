"""Sizes of the device memory through which the blocks of a launch exchange sums."""

from __future__ import annotations

from typing import NamedTuple


class Handover(NamedTuple):
    """Sizes of the device memory through which the blocks of a launch exchange sums.

    Attributes:
        floats: number of float32 sums, uninitialised.
        flags: number of 32-bit words, zero at launch.
    """

    floats: int
    flags: int
