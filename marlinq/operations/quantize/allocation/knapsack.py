"""The multiple-choice knapsack problem: one candidate for each unit, least total cost within a number of
bytes.

Dynamic programming over the bytes beyond each unit's smallest candidate solves it exactly. Bytes are counted
in steps. Where the greatest common divisor of all differences gives at most :data:`MOST_STEPS` steps, it is
the step, and the choice is exact to the byte. Else the step is the smallest multiple of it that gives so few
steps, and differences are rounded up: the choice fits, and is the best among those that fit after rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_STEPS = 1 << 18
"""largest number of steps: for 300 units a table of 80 MB, filled in ten seconds"""


@dataclass(frozen=True)
class Item:
    """One candidate of one unit.

    Attributes:
        nbytes: bytes that it takes, at least 0.
        cost: quantity to minimise; any finite number.
    """

    nbytes: int
    cost: float


@dataclass(frozen=True)
class AllocationChoice:
    """The best choice.

    Attributes:
        items: index of the chosen candidate of every unit, in order.
        nbytes: bytes of all chosen candidates.
        cost: sum of their costs.
        step: bytes that sizes beyond a unit's smallest candidate were rounded up to a multiple of.
        exact: whether the step divides all these sizes, so that rounding changed none.
    """

    items: tuple[int, ...]
    nbytes: int
    cost: float
    step: int
    exact: bool


def choose(units: Sequence[Sequence[Item]], budget: int) -> AllocationChoice | None:
    """The choice of least cost within ``budget`` bytes; among equal costs, the one with the fewest bytes.

    Args:
        units: candidates of each unit, at least one.
        budget: bytes that all units together may take.

    Returns:
        The choice; None where even the smallest candidates take more.
    """
    least = [min(item.nbytes for item in items) for items in units]
    room = budget - sum(least)
    if room < 0:
        return None
    extra = [[item.nbytes - low for item in items] for items, low in zip(units, least, strict=True)]
    divisor = math.gcd(*(size for sizes in extra for size in sizes)) or 1
    # Bytes beyond the largest candidates are left out, which keeps the steps fine.
    step = divisor * max(1, -(-min(room, sum(map(max, extra))) // (divisor * MOST_STEPS)))
    steps = min(room // step, sum(-(-max(sizes) // step) for sizes in extra))
    # best[s]: least cost of the units so far in s steps or fewer.
    best: NDArray[np.float64] = np.zeros(steps + 1)
    taken = []
    for items, sizes in zip(units, extra, strict=True):
        total = np.full(steps + 1, np.inf)
        pick = np.zeros(steps + 1, dtype=np.int8)
        for index, (item, size) in enumerate(zip(items, sizes, strict=True)):
            shift = -(-size // step)
            if shift > steps:
                continue
            with_item = best[: steps + 1 - shift] + item.cost
            better = with_item < total[shift:]
            total[shift:][better] = with_item[better]
            pick[shift:][better] = index
        best = total
        taken.append(pick)
    # argmin takes the first of equal costs, which has the fewest steps.
    place = int(np.argmin(best))
    chosen = []
    for pick, sizes in zip(reversed(taken), reversed(extra), strict=True):
        index = int(pick[place])
        chosen.append(index)
        place -= -(-sizes[index] // step)
    chosen.reverse()
    picked = [items[index] for items, index in zip(units, chosen, strict=True)]
    return AllocationChoice(
        items=tuple(chosen),
        nbytes=sum(item.nbytes for item in picked),
        cost=math.fsum(item.cost for item in picked),
        step=step,
        exact=step == divisor,
    )
