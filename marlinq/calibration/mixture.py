"""Several sources of text with weights, and the share of each."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from marlinq.core.errors import UsageError

_WEIGHTED = re.compile(r"(?P<source>.+)=(?P<weight>\d+(?:\.\d+)?)")
_MOST_WEIGHT = 1e100
"""bound of a weight; products and sums of smaller ones are finite"""


@dataclass(frozen=True)
class MixturePart:
    """One source (as :mod:`marlinq.calibration.sources` describes, or ``self``) and its weight."""

    source: str
    weight: float = 1.0


def read_part(spelling: str) -> MixturePart:
    """Parses ``SOURCE`` or ``SOURCE=WEIGHT``; if a file with the whole name exists, there is no weight.

    Raises:
        UsageError: the weight is 0, or 1e100 or more.
    """
    match = _WEIGHTED.fullmatch(spelling)
    # Unlike methods of Path, this takes a name that no file can have.
    if match is None or os.path.lexists(spelling):
        return MixturePart(spelling)
    weight = float(match["weight"])
    if weight == 0:
        raise UsageError(f"calibration {spelling!r}: expected a weight above 0; leave the source out instead")
    if weight >= _MOST_WEIGHT:
        raise UsageError(
            f"calibration {match['source']!r}: expected a weight below {_MOST_WEIGHT:g}, found {weight:g}; "
            "lower all weights alike"
        )
    return MixturePart(match["source"], weight)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Integers in proportion to ``weights`` with the sum ``total`` (largest remainder method)."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: total - sum(counts)]:
        counts[place] += 1
    return counts
