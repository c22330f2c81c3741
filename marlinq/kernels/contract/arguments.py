"""The parameters of the kernels that multiply, as structures that the driver reads."""

from __future__ import annotations

import ctypes
from typing import Any

_EXTENTS = ("m", "n", "k")
TENSOR_MAP_BYTES = 128
"""Bytes of a CUtensorMap."""

ActivationMaps = ctypes.c_ubyte * (2 * TENSOR_MAP_BYTES)
"""Maps of activations, in boxes of a tile's rows and in boxes of those that whole tiles leave."""

WeightMaps = ctypes.c_ubyte * (3 * TENSOR_MAP_BYTES)
"""Maps of words, scales and zero points."""


class PlainArguments(ctypes.Structure):
    """The parameters of a kernel that takes ``x`` by pointer and stride."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "words", "scales", "zeros", "bias", "out")),
        *((name, ctypes.c_int) for name in _EXTENTS),
        ("x_stride", ctypes.c_longlong),
        ("out_stride", ctypes.c_longlong),
        ("dependent", ctypes.c_int),
    )


_MAPPED_FIELDS: tuple[tuple[str, type[ctypes.Array[Any] | ctypes._SimpleCData[Any]]], ...] = (
    ("x", ActivationMaps),
    ("weight", WeightMaps),
    *((name, ctypes.c_void_p) for name in ("scales", "zeros", "bias", "out")),
    *((name, ctypes.c_int) for name in _EXTENTS),
    ("out_stride", ctypes.c_longlong),
    ("dependent", ctypes.c_int),
)


class MappedArguments(ctypes.Structure):
    """The parameters of the bulk kernel, whose large operands are tensor maps (``cuda/tma/producer.cuh``)."""

    _fields_ = _MAPPED_FIELDS


class WarpgroupArguments(ctypes.Structure):
    """The parameters of the warpgroup kernel, as those of the bulk kernel."""

    _fields_ = (*_MAPPED_FIELDS, ("partials", ctypes.c_void_p), ("flags", ctypes.c_void_p))

    def share(self, partials: int, flags: int) -> None:
        """Say where blocks leave sums for each other (:mod:`marlinq.kernels.driver.handover_memory`)."""
        self.partials = partials
        self.flags = flags


Arguments = PlainArguments | MappedArguments | WarpgroupArguments
