"""The activation between an MLP's products (``cuda/step/activate.cuh``)."""

from __future__ import annotations

import ctypes
from typing import Literal

from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, Prepared, address, check_rows

Arrangement = Literal["tiles", "halves", "apart", "plain"]
"""Order of the columns of gate and up: alternating 64 of each (``tiles``), all of gate and then all of up
(``halves``), up in rows of its own (``apart``), or no gate (``plain``)."""

_THREADS = 128


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("other", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("x_stride", ctypes.c_longlong),
        ("other_stride", ctypes.c_longlong),
        ("out_stride", ctypes.c_longlong),
        ("scale", ctypes.c_float),
    )


def activate(
    x: Tensor,
    out: Tensor,
    activation: str,
    arrangement: Arrangement,
    scale: float = 1.0,
    up: Tensor | None = None,
) -> Prepared:
    """``out = activation(scale * gate) * up``, or ``activation(scale * x)`` where the arrangement is plain.

    Args:
        x: [M, 2 * I] (I a multiple of 64 for tiles), or [M, I] where it is plain or up is apart; further
            columns are padding.
        out: [M, I].
        activation: name as in :attr:`marlinq.models.anatomy.MLP.activation`.
        arrangement: order of gate and up in ``x``.
        scale: factor on the gate.
        up: [M, I], where it is apart; else None.

    Raises:
        ValueError: a tensor is not 16-bit or not aligned to 16 bytes, or shapes don't fit each other.
    """
    check_rows(x=x, out=out, up=up)
    m, columns = out.shape
    wanted = columns * (1 if arrangement in ("plain", "apart") else 2)
    if (up is not None) != (arrangement == "apart") or (up is not None and up.shape != out.shape):
        raise ValueError(f"up: expected rows as out, {list(out.shape)}, where it is apart and only there")
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
    other = x[:, columns:] if arrangement == "halves" else up
    arguments = _Arguments(
        *(x.data_ptr(), address(other), out.data_ptr(), m, columns),
        *(x.stride(0), 0 if other is None else other.stride(0), out.stride(0), scale),
    )
    grid = -(-m * (columns // VECTOR) // _THREADS)
    return Prepared(
        Instantiation("step/activate.cuh", "step_activate", parameters), grid, _THREADS, arguments
    )
