"""Weights of one shape and scheme side by side: a mixture's block has hundreds of small ones, and a GPU works
on one for less time than it takes to ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from marlinq.core.weight import QuantizedWeight
from marlinq.operations.quantize.head import joined

ItemT = TypeVar("ItemT")

# Weights side by side at most, unless one has more: 128 MiB in float32.
LOT_WEIGHTS = 1 << 25


class Lot(NamedTuple, Generic[ItemT]):
    """Quantised weights of one shape.

    Attributes:
        items: what they belong to.
        weight: the weights of all, [items * N, K].
    """

    items: list[ItemT]
    weight: QuantizedWeight


def in_lots(
    solved: Iterable[tuple[ItemT, QuantizedWeight]], limit: int = LOT_WEIGHTS
) -> Iterator[Lot[ItemT]]:
    """What belongs to each weight, and the weights, in lots of equal shape, groups and elements.

    Args:
        solved: all on one device; lots keep the order of what is alike.
        limit: weights of a lot; one with more is a lot of its own.
    """
    waiting: dict[tuple[object, ...], list[tuple[ItemT, QuantizedWeight]]] = {}
    for item, weight in solved:
        shape = (weight.in_features, weight.out_features)
        if not weight.has_trivial_g_idx:
            yield Lot([item], weight)
            continue
        key = (*shape, weight.scheme)
        members = waiting.setdefault(key, [])
        if members and (len(members) + 1) * shape[0] * shape[1] > limit:
            yield _lot(members)
            members.clear()
        members.append((item, weight))
    for members in waiting.values():
        yield _lot(members)


def _lot(members: list[tuple[ItemT, QuantizedWeight]]) -> Lot[ItemT]:
    return Lot([item for item, _ in members], joined([weight for _, weight in members]))
