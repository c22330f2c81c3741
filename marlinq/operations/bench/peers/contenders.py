"""Interfaces of the implementations that are timed: for products and for routed layers of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from marlinq.kernels.experts import ExpertWeights
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.weights import Weight

Run = Callable[[int, Tensor], Tensor]
"""``run(copy, x)``: x [M, K] times one of the prepared copies of the weight, [M, N]."""


class Contender(Protocol):
    """One implementation of the product.

    Attributes:
        name: name in options and reports.
        any_format: True where every weight format is supported, False where only 4-bit integers are.
    """

    name: str
    any_format: bool

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        """Why it can't run such weights here, or None."""
        ...

    def nbytes(self, weight: Weight) -> int:
        """Bytes read of one copy of the weight in one product."""
        ...

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        """Pack ``copies`` copies of the weight, to be run at ``batches`` rows."""
        ...


@dataclass(frozen=True)
class Routing:
    """A router's choice of T experts for each of M rows: ids int32 [M, T] and weights float32 [M, T]."""

    ids: Tensor
    weights: Tensor


RunLayer = Callable[[int, Tensor], Tensor]
"""``run(number, x)``: the layer for x [M, H] with one of the prepared routings, [M, H]."""


class ExpertsContender(Protocol):
    """One implementation of a routed layer."""

    name: str

    def unavailable(self) -> str | None:
        """Why it can't run here, or None."""
        ...

    def load(
        self, layer: ExpertsLayer, weights: ExpertWeights, scale_dtype: torch.dtype | None = None
    ) -> None:
        """Pack the experts; ``scale_dtype`` as in
        :class:`~marlinq.operations.bench.weights.Weight`."""
        ...

    def prepare(self, m: int, routings: Sequence[Routing]) -> RunLayer:
        """Get ready for batches of ``m`` rows."""
        ...
