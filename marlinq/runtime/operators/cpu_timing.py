"""Measure the time of products on this CPU, with weights that are in no cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

Product = Callable[[], object]
"""One product with a weight of its own."""

# Bytes of all copies of a weight together, larger than most last-level caches. A decode step reads every
# weight once, from memory; copies that are read in turn are read from memory, too.
_COLD_BYTES = 64 << 20
_MOST_TURNS = 96
_LEAST_TURNS = 16
_ENOUGH_SECONDS = 0.3


def cold_copies(tensor: Tensor) -> list[Tensor]:
    """``tensor`` and copies of it, so many that they don't fit a cache together, within a limit."""
    copies = min(max(-(-_COLD_BYTES // max(tensor.nbytes, 1)), 1), _MOST_TURNS)
    return [tensor, *(tensor.clone() for _ in range(copies - 1))]


def seconds_in_turn(*candidates: Sequence[Product]) -> tuple[float, ...]:
    """Seconds of a product of each candidate: the tenth percentile of runs in which candidates alternate.

    On a busy machine most products may wait for a displaced thread a thousand times longer than they compute,
    so a mean would be useless. The minimum may come from a weight that was in a cache after all.

    Args:
        candidates: each a sequence of the same product with copies of its weight, run through again and again
            for 96 turns; at least 16, after which 0.3 s are enough.
    """
    times: list[list[float]] = [[] for _ in candidates]
    for products in candidates:
        products[0]()  # whatever is allocated or prepared at the first call
    began = time.perf_counter()
    for turn in range(_MOST_TURNS):
        for seconds, products in zip(times, candidates, strict=True):
            product = products[turn % len(products)]
            start = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - start)
        if turn + 1 >= _LEAST_TURNS and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
    return tuple(sorted(seconds)[len(seconds) // 10] for seconds in times)
