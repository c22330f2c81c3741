"""What a product does with whole rows beside multiplying: ``cuda/epilogue/rows.cuh``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from marlinq.kernels.contract.arguments import Arguments, MappedArguments, PlainArguments
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup import WarpgroupConfig

KernelConfig = StreamConfig | BulkConfig | WarpgroupConfig
# Largest tiles: with larger ones the stream kernel has no registers for work on rows, and the warpgroup
# kernel was not measured.
_STREAM_ROWS_MOST, _ROWS_MOST = 8, 64
_SQUARED_COLUMNS, _PUSHED_COLUMNS = 64, 16


@dataclass(frozen=True, eq=False)
class Normed:
    """The activations are ``weight * x / unit``, of which the RMS norm still has to be taken.

    Attributes:
        squares: float32 [M, parts], whose sum over a row is that of the squares of x.
        width: channels of x.
        eps: added to the mean square.
        unit: what the results are multiplied by.
    """

    squares: Tensor
    width: int
    eps: float
    unit: float


@dataclass(frozen=True, eq=False)
class Added:
    """The results go to the residual stream: ``stored = residual + factor * result``, ``out = weight *
    stored``.

    Attributes:
        residual: [M, N].
        weight: float32 [N].
        stored: as ``residual``, other memory.
        squares: float32 [M, N / :attr:`RowVariant.squared_columns`]: sums of squares of ``stored`` over so
            many columns.
        factor: on the results.
    """

    residual: Tensor
    weight: Tensor
    stored: Tensor
    squares: Tensor
    factor: float = 1.0


_ROW_FIELDS: tuple[tuple[str, type[ctypes._SimpleCData[Any]]], ...] = (
    ("squares", ctypes.c_void_p),
    ("parts", ctypes.c_int),
    *((name, ctypes.c_float) for name in ("unit", "eps", "inverse_width")),
    *((name, ctypes.c_void_p) for name in ("residual", "norm_weight", "stored", "squares_out")),
    ("residual_stride", ctypes.c_longlong),
    ("factor", ctypes.c_float),
)


class PlainRowArguments(ctypes.Structure):
    """The stream kernel's parameters, and those of the work on rows."""

    _fields_ = (*PlainArguments._fields_, *_ROW_FIELDS)


class MappedRowArguments(ctypes.Structure):
    """The bulk and the warpgroup kernel's, without a place for sums that blocks share."""

    _fields_ = (*MappedArguments._fields_, *_ROW_FIELDS)


RowArguments = PlainRowArguments | MappedRowArguments


@dataclass(frozen=True)
class RowVariant:
    """A product's variant that does such work.

    Attributes:
        instantiation: what is compiled.
        squared_columns: columns that one of its sums of squares is of.
    """

    instantiation: Instantiation
    squared_columns: int


@dataclass(frozen=True, eq=False)
class RowWork:
    """One of them, or both."""

    normed: Normed | None = None
    added: Added | None = None

    def variant(self, config: KernelConfig, problem: Problem) -> RowVariant | None:
        """Of ``config``, which does it; None where that can't."""
        return row_variant(config, problem, normed=self.normed is not None, adds=self.added is not None)

    def arguments(self, plain: Arguments) -> RowArguments:
        """The variant's parameters."""
        kind = PlainRowArguments if isinstance(plain, PlainArguments) else MappedRowArguments
        own = len(kind._fields_) - len(_ROW_FIELDS)
        given = kind(*(getattr(plain, field[0]) for field in kind._fields_[:own]))
        if self.normed is not None:
            given.squares = self.normed.squares.data_ptr()
            given.parts = self.normed.squares.shape[1]
            given.unit, given.eps = self.normed.unit, self.normed.eps
            given.inverse_width = 1 / self.normed.width
        if self.added is not None:
            given.residual = self.added.residual.data_ptr()
            given.norm_weight = self.added.weight.data_ptr()
            given.stored = self.added.stored.data_ptr()
            given.squares_out = self.added.squares.data_ptr()
            given.residual_stride = self.added.residual.stride(0)
            given.factor = self.added.factor
        return given


def row_variant(config: KernelConfig, problem: Problem, *, normed: bool, adds: bool) -> RowVariant | None:
    """The variant of ``config`` that takes or leaves rows that are not normalised yet; None without one.

    The stream kernel does both in tiles of up to eight rows, the warpgroup kernel where a tile's sums meet,
    in tiles of up to 64. The bulk kernel leaves such rows.
    """
    if adds and problem.activation is not None:
        return None
    if isinstance(config, StreamConfig):
        fits, name, columns = config.tile_m <= _STREAM_ROWS_MOST, "stream", _SQUARED_COLUMNS
    elif isinstance(config, BulkConfig):
        fits, name, columns = config.tile_m <= _ROWS_MOST and not normed, "bulk", _PUSHED_COLUMNS
    else:
        fits = config.tile_m <= _ROWS_MOST and config.meets(problem)
        name, columns = "warpgroup", _PUSHED_COLUMNS if config.pushes else _SQUARED_COLUMNS
    if not fits:
        return None
    plain = config.instantiation(problem)
    rows = Instantiation(
        f"kernels/{name}_rows.cuh",
        f"{plain.function}_rows",
        (*plain.parameters, ("NORMED", normed), ("ADDS", adds)),
    )
    return RowVariant(rows, columns)
