"""Products that also normalise their input or add to the residual stream (``cuda/epilogue/rows.cuh``).

A row's RMS norm needs the sum of its squares, which spans many blocks. So the product that writes a row
leaves partial sums of squares, and the product that reads it adds them up and divides.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from marlinq.kernels.contract.arguments import MappedArguments, PlainArguments
from marlinq.kernels.contract.instantiation import Instantiation

SQUARED_COLUMNS, PUSHED_COLUMNS = 64, 16
"""Columns that one partial sum of squares spans: where a tile's sums stay in a block, and where warps send
them to other blocks."""


@dataclass(frozen=True, eq=False)
class Normed:
    """An RMS norm that the product applies to its input.

    The activations in memory are ``weight * x / unit``: multiplied by the norm's weight, not yet divided by
    the root mean square of x.

    Attributes:
        squares: float32 [M, parts], partial sums of the squares of x; a row's total is their sum.
        width: channels of x.
        eps: epsilon that the norm adds to the mean square.
        unit: factor by which the results are multiplied.
    """

    squares: Tensor
    width: int
    eps: float
    unit: float


@dataclass(frozen=True, eq=False)
class Added:
    """A residual stream that the product adds its results to.

    ``stored = residual + factor * result`` and ``out = weight * stored``, the input of the next product.

    Attributes:
        residual: residual stream before, [M, N].
        weight: weight of the next RMS norm, float32 [N].
        stored: residual stream after, like ``residual`` but in other memory.
        squares: float32 [M, N / c], sums of squares of ``stored`` over c = :attr:`RowVariant.squared_columns`
            columns.
        factor: factor of the results.
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
    """Parameters of the stream kernel, then those of norm and residual stream."""

    _fields_ = (*PlainArguments._fields_, *_ROW_FIELDS)


class MappedRowArguments(ctypes.Structure):
    """Parameters of the bulk kernel, or of the warpgroup kernel without stream-K, then those of norm and
    residual stream."""

    _fields_ = (*MappedArguments._fields_, *_ROW_FIELDS)


RowArguments = PlainRowArguments | MappedRowArguments
"""Parameters of any product with a norm or a residual stream."""


@dataclass(frozen=True)
class RowVariant:
    """A configuration's kernel with a norm, a residual stream, or both.

    Attributes:
        instantiation: source of the kernel.
        squared_columns: columns that each of its partial sums of squares spans.
        arguments: structure of its parameters; it begins with the fields of the plain product's.
    """

    instantiation: Instantiation
    squared_columns: int
    arguments: type[RowArguments]

    @classmethod
    def of(
        cls,
        plain: Instantiation,
        header: str,
        squared_columns: int,
        arguments: type[RowArguments],
        *,
        normed: bool,
        adds: bool,
    ) -> RowVariant:
        """The kernel in ``header``, configured like ``plain``, the product without norm and residual
        stream."""
        parameters = (*plain.parameters, ("NORMED", normed), ("ADDS", adds))
        return cls(Instantiation(header, f"{plain.function}_rows", parameters), squared_columns, arguments)


@dataclass(frozen=True, eq=False)
class RowWork:
    """Norm and residual stream of one product.

    Attributes:
        normed: RMS norm that the product applies to its input, or None.
        added: residual stream that the product adds its results to, or None.
    """

    normed: Normed | None = None
    added: Added | None = None

    def arguments(self, kind: type[RowArguments], plain: ctypes.Structure) -> RowArguments:
        """Parameters of ``kind``: the fields of ``plain``, the product alone, then norm and residual
        stream."""
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
