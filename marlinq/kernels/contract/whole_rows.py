"""What a product does with whole rows beside multiplying: ``cuda/epilogue/rows.cuh``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from marlinq.kernels.contract.arguments import MappedArguments, PlainArguments
from marlinq.kernels.contract.instantiation import Instantiation

SQUARED_COLUMNS, PUSHED_COLUMNS = 64, 16
"""Columns that a sum of squares is of: where a block holds a tile's sums, and where warps send them away."""


@dataclass(frozen=True, eq=False)
class Normed:
    """The activations are ``weight * x / unit``, of which the RMS norm still has to be taken.

    Attributes:
        squares: float32 [M, parts], whose sum over a row is that of the squares of x.
        width: channels of x.
        eps: added to the mean square.
        unit: factor of the results.
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
"""The parameters of any product that works on whole rows."""


@dataclass(frozen=True)
class RowVariant:
    """The kernel of a configuration that works on whole rows, too.

    Attributes:
        instantiation: source of the kernel.
        squared_columns: columns that one of its sums of squares is of.
        arguments: structure of its parameters; those of the product alone come first, by the same names.
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
        """The kernel in ``header`` with the members of ``plain``, the product alone."""
        parameters = (*plain.parameters, ("NORMED", normed), ("ADDS", adds))
        return cls(Instantiation(header, f"{plain.function}_rows", parameters), squared_columns, arguments)


@dataclass(frozen=True, eq=False)
class RowWork:
    """What a product does with whole rows beside multiplying.

    Attributes:
        normed: norm of the activations that is still to be taken, or None.
        added: residual stream that the results are added to, or None.
    """

    normed: Normed | None = None
    added: Added | None = None

    def arguments(self, kind: type[RowArguments], plain: ctypes.Structure) -> RowArguments:
        """Parameters of ``kind``; ``plain`` are those of the product alone."""
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
