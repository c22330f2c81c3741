"""Where the residual stream and its norm need no kernel between two products.

The product in front adds its results to the residual stream, and leaves the norm's weight times the sum
together with sums of squares; the one behind multiplies its results by the reciprocal root
(``cuda/epilogue/rows.cuh``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress
from marlinq.kernels import Problem
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.whole_rows import Added, Normed, RowVariant
from marlinq.kernels.launch.precompile import precompile_instantiations
from marlinq.kernels.step import RowNorm
from marlinq.runtime.step.bound import BoundLayer, BoundMLP
from marlinq.runtime.step.products import Product


@dataclass(frozen=True, eq=False)
class Link:
    """A norm between two products.

    Attributes:
        before, behind: the products.
        weight: float32 [hidden], the norm's, divided by ``unit``.
        unit: a power of two, with which no weight is greater than one: 16 bits then hold ``weight * x``
            wherever they hold x.
        eps: the norm's.
        kernels: both products' variants.
        squared_columns: columns that a sum of squares is of, which the one leaves and the other takes.
    """

    before: Product
    behind: Product
    weight: Tensor
    unit: float
    eps: float
    kernels: tuple[Instantiation, Instantiation]
    squared_columns: int


class RowLinks:
    """The norms of a step that have no kernel of their own.

    Args:
        layers: layers of the forward.
        hidden: channels of the residual stream.
        rows: number of rows of a step.
        dtype: dtype of activations.
        device_index: index of the GPU.
        activated: products whose epilogue has the activation, and their problems.
    """

    def __init__(
        self,
        layers: Sequence[BoundLayer],
        hidden: int,
        rows: int,
        dtype: torch.dtype,
        device_index: int,
        activated: Mapping[Product, Problem],
    ) -> None:
        self._hidden, self._rows, self._dtype, self._index = hidden, rows, dtype, device_index
        self._activated = activated
        self._links: dict[int, Link] = {}
        for before, norm, behind in _pairs(layers):
            link = self._link(before, norm, behind)
            if link is not None:
                # Of equal norms each has its own products.
                self._links[id(norm)] = link
        self.before = frozenset(link.before for link in self._links.values())
        self._squares: list[Tensor] = []
        self._parts = hidden // min((link.squared_columns for link in self._links.values()), default=1)

    def found(self, norm: RowNorm | None) -> Link | None:
        """The link that takes the place of this norm's kernel."""
        return None if norm is None else self._links.get(id(norm))

    def precompile(self, progress: ReportProgress) -> int:
        """Compile, in parallel, what the cache lacks; returns how many kernels those were."""
        if not self._links:
            return 0
        wanted = (kernel for link in self._links.values() for kernel in link.kernels)
        return precompile_instantiations(wanted, self._index, progress)

    def work(self, link: Link, residual: Tensor, stored: Tensor, factor: float) -> tuple[Added, Normed]:
        """What the products in front and behind do: ``stored = residual + factor * result``."""
        parts = self._hidden // link.squared_columns
        if len(self._squares) < 2:
            squares = torch.zeros(self._rows * self._parts, dtype=torch.float32, device=residual.device)
        else:
            # The product before the one in front has read these.
            squares = self._squares.pop(0)
        self._squares.append(squares)
        squares = squares[: self._rows * parts].view(self._rows, parts)
        added = Added(residual, link.weight, stored, squares, factor)
        return added, Normed(squares, self._hidden, link.eps, link.unit)

    def _link(self, before: Product, norm: RowNorm, behind: Product) -> Link | None:
        fits = before.columns == before.features == self._hidden == behind.inner
        if norm.kind == "LAYER" or norm.weight is None or norm.bias is not None:
            return None
        if not fits or before in self._activated:
            return None
        front = self._variant(before, normed=False, adds=True)
        back = self._variant(behind, normed=True, adds=False)
        if front is None or back is None or self._hidden % front.squared_columns:
            return None
        weight = norm.weight.float() + norm.offset
        largest = float(weight.abs().amax())
        unit = 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0
        kernels = (front.instantiation, back.instantiation)
        return Link(before, behind, weight / unit, unit, norm.eps, kernels, front.squared_columns)

    def _variant(self, product: Product, *, normed: bool, adds: bool) -> RowVariant | None:
        problem = self._activated.get(product)
        problems = product.problems(self._rows) if problem is None else [problem]
        if len(problems) != 1:
            return None
        return product.row_variant(problems[0], self._index, normed=normed, adds=adds)


def _pairs(layers: Sequence[BoundLayer]) -> Iterable[tuple[Product, RowNorm, Product]]:
    """Norms of sums that a single product adds to and a single product reads."""
    for layer, following in itertools.zip_longest(layers, layers[1:]):
        if layer.anatomy.parallel:
            continue
        if not isinstance(layer.mlp, BoundMLP):
            # A router reads that norm, and experts add to the stream behind.
            continue
        if layer.post_attention_norm is None and layer.mlp_norm is not None:
            yield layer.output, layer.mlp_norm, layer.mlp.inputs
        if following is None or following.anatomy.parallel:
            continue
        if following.delta is not None:
            # Two products read that norm.
            continue
        if layer.post_mlp_norm is None and following.attention_norm is not None:
            yield layer.mlp.down, following.attention_norm, following.qkv
