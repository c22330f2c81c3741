"""Joins quantised weights of one shape and scheme, so that one GPU operation serves all of them.

A mixture's block has hundreds of small weights, and launching an operation takes longer than computing one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from marlinq.core.weight import QuantizedWeight

ItemT = TypeVar("ItemT")

BATCH_WEIGHTS = 1 << 25
"""Largest number of weights in a batch of several modules: 128 MiB in float32."""


class ModuleBatch(NamedTuple, Generic[ItemT]):
    """Quantised weights of one shape and scheme, joined along their output channels.

    Attributes:
        items: owner of each weight, in order.
        weight: the joined weight, with len(items) * N output channels.
    """

    items: list[ItemT]
    weight: QuantizedWeight


def in_module_batches(
    solved: Iterable[tuple[ItemT, QuantizedWeight]], limit: int = BATCH_WEIGHTS
) -> Iterator[ModuleBatch[ItemT]]:
    """Joins weights of equal shape and scheme into batches.

    Args:
        solved: (owner, weight) pairs, all on one device; a batch keeps their order.
        limit: largest number of weights in a batch; a larger module is a batch alone.
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
    """The output channels of all ``parts``, concatenated in order."""
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
