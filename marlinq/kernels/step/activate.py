"""The activation between an MLP's products (``cuda/step/activate.cuh``)."""

from __future__ import annotations

import ctypes
from typing import Literal

from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, Prepared, check_rows

Arrangement = Literal["tiles", "halves", "plain"]
"""Order of the columns of gate and up: alternating 64 of each (``tiles``), all of gate and then all of up
(``halves``), or no gate (``plain``)."""

_THREADS = 128


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("up_offset", ctypes.c_int),
        ("x_stride", ctypes.c_longlong),
        ("out_stride", ctypes.c_longlong),
        ("scale", ctypes.c_float),
    )


def activate(
    x: Tensor, out: Tensor, activation: str, arrangement: Arrangement, scale: float = 1.0
) -> Prepared:
    """``out = activation(scale * gate) * up``, or ``activation(scale * x)`` where the arrangement is plain.

    Args:
        x: [M, 2 * I] (I a multiple of 64 for tiles), or [M, I] where it is plain; further columns are
            padding.
        out: [M, I].
        activation: name as in :attr:`marlinq.models.anatomy.MLP.activation`.
        arrangement: order of gate and up in ``x``.
        scale: factor on the gate.

    Raises:
        ValueError: a tensor is not 16-bit or not aligned to 16 bytes, or shapes don't fit each other.
    """
    check_rows(x=x, out=out)
    m, columns = out.shape
    wanted = columns * (1 if arrangement == "plain" else 2)
    if x.shape[0] != m or x.shape[1] < wanted:
        raise ValueError(f"x: expected rows of {arrangement} for {list(out.shape)}, found {list(x.shape)}")
    if arrangement == "tiles" and columns % 64:
        raise ValueError(f"out: expected whole tiles of 64 columns, found {columns}")
    parameters = (
        ("Element", ELEMENTS[x.dtype]),
        ("THREADS", _THREADS),
        ("ACTIVATION", f"Activation::{activation.upper()}"),
        ("GATED", arrangement != "plain"),
        ("TILES", arrangement == "tiles"),
    )
    strides = x.stride(0), out.stride(0)
    arguments = _Arguments(x.data_ptr(), out.data_ptr(), m, columns, columns, *strides, scale)
    grid = -(-m * (columns // VECTOR) // _THREADS)
    return Prepared(
        Instantiation("step/activate.cuh", "step_activate", parameters), grid, _THREADS, arguments
    )
