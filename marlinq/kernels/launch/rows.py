"""What a product does with whole rows beside multiplying: ``cuda/epilogue/rows.cuh``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from marlinq.kernels.jit.instantiation import Instantiation
from marlinq.kernels.launch.operands import PlainArguments

SQUARED_COLUMNS = 64
"""Columns that one sum of squares is of."""


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
        squares: float32 [M, N / 64]: sums of squares of ``stored`` over 64 columns.
        factor: on the results.
    """

    residual: Tensor
    weight: Tensor
    stored: Tensor
    squares: Tensor
    factor: float = 1.0


class RowArguments(ctypes.Structure):
    """The stream kernel's parameters, and those of the work on rows."""

    _fields_ = (
        *PlainArguments._fields_,
        ("squares", ctypes.c_void_p),
        ("parts", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("unit", "eps", "inverse_width")),
        *((name, ctypes.c_void_p) for name in ("residual", "weight", "stored", "squares_out")),
        ("residual_stride", ctypes.c_longlong),
        ("factor", ctypes.c_float),
    )


@dataclass(frozen=True, eq=False)
class RowWork:
    """One of them, or both."""

    normed: Normed | None = None
    added: Added | None = None

    def instantiation(self, plain: Instantiation) -> Instantiation:
        """The stream kernel's variant that does it."""
        return row_instantiation(plain, normed=self.normed is not None, adds=self.added is not None)

    def arguments(self, plain: PlainArguments) -> RowArguments:
        """The variant's parameters."""
        given = RowArguments(*(getattr(plain, field[0]) for field in PlainArguments._fields_))
        if self.normed is not None:
            given.squares = self.normed.squares.data_ptr()
            given.parts = self.normed.squares.shape[1]
            given.unit, given.eps = self.normed.unit, self.normed.eps
            given.inverse_width = 1 / self.normed.width
        if self.added is not None:
            given.residual = self.added.residual.data_ptr()
            given.weight = self.added.weight.data_ptr()
            given.stored = self.added.stored.data_ptr()
            given.squares_out = self.added.squares.data_ptr()
            given.residual_stride = self.added.residual.stride(0)
            given.factor = self.added.factor
        return given


def row_instantiation(plain: Instantiation, *, normed: bool, adds: bool) -> Instantiation:
    """The variant of the stream kernel ``plain`` that takes or leaves rows that are not normalised yet."""
    return Instantiation(
        "kernels/stream_rows.cuh",
        "w4a16_stream_rows",
        (*plain.parameters, ("NORMED", normed), ("ADDS", adds)),
    )
