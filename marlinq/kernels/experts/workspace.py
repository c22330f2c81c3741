"""Memory between the launches of a routed layer, in one allocation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.experts.configurations import (
    DirectDecision,
    ExpertsDecision,
    ExpertsShape,
    SortedDecision,
)
from marlinq.kernels.experts.experts_decision import at_least

ROUTE_THREADS = 1024
"""Threads of a block that sorts pairs, one for each pair."""
_ALIGNMENT = 256


class ExpertsWorkspace(NamedTuple):
    """Memory between the launches of a routed layer, uninitialised before the first.

    Attributes:
        counts: int32 [blocks that sort, experts], pairs of each expert that a block has counted.
        records: int32 [most tiles, 4], expert and rows of each tile (``cuda/experts/records.cuh``).
        tiles: int32 [1], number of tiles.
        places: int32 [M * T], index of a pair's row among the sorted ones.
        rows: [M * T, H], sorted activations; overwritten by the results of down.
        inner: [M * T, I], results of gate and up.
    """

    counts: Tensor
    records: Tensor
    tiles: Tensor
    places: Tensor
    rows: Tensor
    inner: Tensor

    @classmethod
    def of(cls, shape: ExpertsShape, decision: ExpertsDecision, device: torch.device) -> ExpertsWorkspace:
        """Uninitialised memory in one allocation; without sorting all but ``inner`` are empty."""
        places = WorkspacePlaces.of(shape, decision)
        memory = torch.empty(places.nbytes, dtype=torch.uint8, device=device)
        return cls(
            *(
                memory[start : start + dtype.itemsize * math.prod(extent)].view(dtype).view(extent)
                for start, dtype, extent in zip(places.starts, places.dtypes, places.extents, strict=True)
            )
        )


class WorkspacePlaces(NamedTuple):
    """Where the tensors of an :class:`ExpertsWorkspace` lie in its allocation.

    Attributes:
        nbytes: bytes of the allocation.
        starts: offset of each tensor, in bytes.
        dtypes: dtype of each tensor.
        extents: shape of each tensor.
    """

    nbytes: int
    starts: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    extents: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shape: ExpertsShape, decision: ExpertsDecision) -> WorkspacePlaces:
        sorts = not isinstance(decision, DirectDecision)
        routes = isinstance(decision, SortedDecision) and not decision.local_sort
        tiles = most_tiles(shape, decision.tile_m) if isinstance(decision, SortedDecision) and routes else 0
        blocks = -(-shape.pairs // ROUTE_THREADS)
        extents = (
            (blocks if routes and blocks > 1 else 0, at_least(shape.experts)),
            (tiles, 4),
            (int(routes), 1),
            (shape.pairs if sorts else 0, 1),
            (shape.pairs if sorts else 0, shape.hidden),
            (shape.pairs, shape.inner),
        )
        element = torch.bfloat16 if shape.bfloat16 else torch.float16
        dtypes = *(torch.int32,) * 4, element, element
        starts = [0]
        for dtype, extent in zip(dtypes, extents, strict=True):
            starts.append(starts[-1] + -(-dtype.itemsize * math.prod(extent) // _ALIGNMENT) * _ALIGNMENT)
        return cls(starts[-1], tuple(starts[:-1]), dtypes, extents)


def most_tiles(shape: ExpertsShape, tile_m: int) -> int:
    """Largest possible number of tiles of sorted rows."""
    return shape.pairs // tile_m + min(shape.pairs, shape.experts)
