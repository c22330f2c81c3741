"""The exact choice: one candidate for each unit, the least total cost within a number of bytes.

This is the multiple-choice knapsack problem. Dynamic programming over the bytes beyond each unit's smallest
candidate solves it exactly. Bytes are counted in steps: in the greatest common divisor of all differences
where that gives at most :data:`MOST_STEPS` steps, which makes the choice exact to the byte; else in the least
coarser step that does, each difference rounded up, so that the choice fits and is the best among those that
fit with each unit's bytes rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_STEPS = 1 << 18
"""Steps of bytes that are told apart: at 300 units a table of 80 MB, filled in ten seconds."""


@dataclass(frozen=True)
class Item:
    """One candidate of one unit.

    Attributes:
        nbytes: bytes that it takes, at least 0.
        cost: what is to be small; any finite number.
    """

    nbytes: int
    cost: float


@dataclass(frozen=True)
class Choice:
    """The best choice.

    Attributes:
        items: index of the chosen candidate of every unit, in order.
        nbytes: bytes of all of them.
        cost: sum of their costs.
        step: bytes that a unit's size was rounded up to, above its smallest candidate; the choice is exact
            to the byte where it divides all differences.
        exact: whether it does.
    """

    items: tuple[int, ...]
    nbytes: int
    cost: float
    step: int
    exact: bool


def choose(units: Sequence[Sequence[Item]], budget: int) -> Choice | None:
    """The choice of least cost, and of the fewest bytes among equals, of at most ``budget`` bytes.

    Args:
        units: the candidates of each unit, at least one.
        budget: bytes of all units together.

    Returns:
        The choice; None where even the smallest candidates take more.
    """
    least = [min(item.nbytes for item in items) for items in units]
    room = budget - sum(least)
    if room < 0:
        return None
    extra = [[item.nbytes - low for item in items] for items, low in zip(units, least, strict=True)]
    divisor = math.gcd(*(size for sizes in extra for size in sizes)) or 1
    # More than the largest candidates together is of no use.
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
    # The first of equal costs has the fewest steps.
    place = int(np.argmin(best))
    chosen = []
    for pick, sizes in zip(reversed(taken), reversed(extra), strict=True):
        index = int(pick[place])
        chosen.append(index)
        place -= -(-sizes[index] // step)
    chosen.reverse()
    picked = [items[index] for items, index in zip(units, chosen, strict=True)]
    return Choice(
        items=tuple(chosen),
        nbytes=sum(item.nbytes for item in picked),
        cost=math.fsum(item.cost for item in picked),
        step=step,
        exact=step == divisor,
    )
