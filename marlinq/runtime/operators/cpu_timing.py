"""How long products take on this CPU: measured, on weights that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

Product = Callable[[], object]
"""One product with a weight of its own."""

# A decode step reads every weight once, so each product finds its weight in memory. Copies of this size
# together, read in turn, do too: they are larger than the last-level cache's share of most processors.
_COLD_BYTES = 64 << 20
# Of small weights, which would need too many copies, a model has few bytes: they may stay in the cache there.
_MOST_COPIES = 256
_ROUNDS = 3


def cold_copies(tensor: Tensor) -> list[Tensor]:
    """``tensor`` and so many copies of it that reading them in turn finds none in a cache."""
    copies = min(max(-(-_COLD_BYTES // max(tensor.nbytes, 1)), 1), _MOST_COPIES)
    return [tensor, *(tensor.clone() for _ in range(copies - 1))]


def seconds_alternated(*candidates: Sequence[Product]) -> tuple[float, ...]:
    """The time of one product of each candidate, which are measured in turn.

    Each candidate is a sequence of products that is run as a whole; the least mean time of a few rounds
    counts, because whatever else runs on the machine can only add to it.
    """
    least = [float("inf")] * len(candidates)
    for products in candidates:
        products[0]()  # whatever is allocated or prepared at the first call
    for _ in range(_ROUNDS):
        for index, products in enumerate(candidates):
            start = time.perf_counter()
            for product in products:
                product()
            least[index] = min(least[index], (time.perf_counter() - start) / len(products))
    return tuple(least)
