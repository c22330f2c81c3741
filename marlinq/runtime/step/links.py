"""Find norms of the residual stream that two products compute between them, without a kernel of their own.

The product before the norm adds its results to the residual stream, and stores the norm's weight times the
sum, and sums of squares. The product behind the norm multiplies its results by the reciprocal root mean
square (``cuda/epilogue/rows.cuh``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress
from marlinq.kernels import Problem
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.whole_rows import Added, Normed, RowVariant
from marlinq.kernels.launch.precompile import precompile_instantiations
from marlinq.kernels.step import RowNorm
from marlinq.runtime.step.bound import BoundDelta, BoundLayer, BoundMLP
from marlinq.runtime.step.products import Product


@dataclass(frozen=True, eq=False)
class Link:
    """A norm that two products compute between them.

    Attributes:
        before, behind: the products before and behind the norm.
        weight: weight of the norm, divided by ``unit``, float32 [hidden].
        unit: power of two that makes all weights at most one, so that ``weight * x`` does not overflow 16
            bits.
        eps: epsilon of the norm.
        kernels: kernels of both products.
        squared_columns: columns that each partial sum of squares spans.
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
                # By identity: norms of equal values belong to different products.
                self._links[id(norm)] = link
        self.before = frozenset(link.before for link in self._links.values())
        self._squares: list[Tensor] = []
        self._parts = hidden // min((link.squared_columns for link in self._links.values()), default=1)

    def link_of(self, norm: RowNorm | None) -> Link | None:
        """The link that replaces this norm's kernel; or None."""
        return None if norm is None else self._links.get(id(norm))

    def precompile(self, progress: ReportProgress) -> int:
        """Compile in parallel the kernels that the cache lacks; returns their number."""
        if not self._links:
            return 0
        wanted = (kernel for link in self._links.values() for kernel in link.kernels)
        return precompile_instantiations(wanted, self._index, progress)

    def work(self, link: Link, residual: Tensor, stored: Tensor, factor: float) -> tuple[Added, Normed]:
        """Work of the products before and behind the norm; ``stored = residual + factor * result``."""
        parts = self._hidden // link.squared_columns
        if len(self._squares) < 2:
            squares = torch.zeros(self._rows * self._parts, dtype=torch.float32, device=residual.device)
        else:
            # Reused: the product that reads these squares runs before the next one writes them.
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


class _Part(NamedTuple):
    """Attention or the MLP of a layer.

    Attributes:
        norm: norm before it, or None.
        reads: the only product that reads the norm; None if there are several or other readers.
        adds: the only product that adds to the residual stream behind, without a norm; or None.
    """

    norm: RowNorm | None
    reads: Product | None
    adds: Product | None


def _parts(layer: BoundLayer) -> Iterable[_Part]:
    if layer.anatomy.parallel:
        yield _Part(None, None, None)
        return
    if layer.output is not None:
        # Two products read the norm before a delta net, or before attention and a mixer beside it.
        several = isinstance(layer.mixer, BoundDelta) or layer.beside is not None
        reads = None if several else layer.qkv
        last = layer.mlp is None and _ends_otherwise(layer)
        plain = layer.post_attention_norm is None and layer.beside is None and not last
        adds = layer.output if plain else None
        yield _Part(layer.attention_norm, reads, adds)
    if isinstance(layer.mlp, BoundMLP):
        adds = layer.mlp.down if layer.post_mlp_norm is None and not _ends_otherwise(layer) else None
        yield _Part(layer.mlp_norm, layer.mlp.inputs, adds)
    elif layer.mlp is not None:
        # A router reads that norm, and experts add to the stream behind.
        yield _Part(None, None, None)


def _ends_otherwise(layer: BoundLayer) -> bool:
    """Whether more follows the last sum of attention or MLP in the layer."""
    return layer.input_gate is not None or layer.stream_scale != 1


def _pairs(layers: Sequence[BoundLayer]) -> Iterable[tuple[Product, RowNorm, Product]]:
    """Norms of sums that a single product adds to and a single product reads."""
    for before, behind in itertools.pairwise(part for layer in layers for part in _parts(layer)):
        if before.adds is not None and behind.norm is not None and behind.reads is not None:
            yield before.adds, behind.norm, behind.reads
