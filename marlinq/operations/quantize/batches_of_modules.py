"""Quantised weights of one shape and scheme side by side, so that one operation serves all of them.

A mixture's block has hundreds of small weights; a GPU works on one for less time than a launch takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from marlinq.core.weight import QuantizedWeight

ItemT = TypeVar("ItemT")

# Elements of a batch at most, unless one weight has more: 128 MiB in float32.
BATCH_WEIGHTS = 1 << 25


class ModuleBatch(NamedTuple, Generic[ItemT]):
    """Quantised weights of one shape and scheme, joined.

    Attributes:
        items: owners of the weights, in order.
        weight: joined weights, [items * N, K].
    """

    items: list[ItemT]
    weight: QuantizedWeight


def in_module_batches(
    solved: Iterable[tuple[ItemT, QuantizedWeight]], limit: int = BATCH_WEIGHTS
) -> Iterator[ModuleBatch[ItemT]]:
    """Joins weights of equal shape, groups and elements.

    Args:
        solved: owner and weight each, all on one device; a batch keeps their order.
        limit: elements of a batch at most; a weight with more is a batch of its own.
    """
    waiting: dict[tuple[object, ...], list[tuple[ItemT, QuantizedWeight]]] = {}
    for item, weight in solved:
        shape = (weight.in_features, weight.out_features)
        if not weight.has_trivial_g_idx or not weight.scheme.per_output:
            yield ModuleBatch([item], weight)
            continue
        key = (*shape, weight.scheme)
        members = waiting.setdefault(key, [])
        if members and (len(members) + 1) * shape[0] * shape[1] > limit:
            yield _batch(members)
            members.clear()
        members.append((item, weight))
    for members in waiting.values():
        yield _batch(members)


def _batch(members: list[tuple[ItemT, QuantizedWeight]]) -> ModuleBatch[ItemT]:
    return ModuleBatch([item for item, _ in members], joined([weight for _, weight in members]))


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The weight whose output channels are those of ``parts``, one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return QuantizedWeight.from_codes(
        first.scheme,
        torch.cat([part.codes for part in parts], dim=1),
        scales=torch.cat([part.scales for part in parts], dim=1),
        zeros=torch.cat([part.zeros for part in parts], dim=1),
        g_idx=first.g_idx,
    )
