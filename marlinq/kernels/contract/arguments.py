"""C structures of the parameters that product kernels are launched with."""

from __future__ import annotations

import ctypes
from typing import Any

_EXTENTS = ("m", "n", "k")
TENSOR_MAP_BYTES = 128
"""Bytes of a CUtensorMap."""

ActivationMaps = ctypes.c_ubyte * (2 * TENSOR_MAP_BYTES)
"""Two tensor maps of the activations: with boxes of TILE_M rows, and with boxes of the M % TILE_M rows of the
last tile."""

ScaledActivationMaps = ctypes.c_ubyte * (5 * TENSOR_MAP_BYTES)
"""The two maps of FP8 activations, one of their scales, and two of their sums."""

WeightMaps = ctypes.c_ubyte * (3 * TENSOR_MAP_BYTES)
"""Three tensor maps: of words, of scales and of zero points."""


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


_HANDOVER_FIELDS = (("partials", ctypes.c_void_p), ("flags", ctypes.c_void_p))


class _Sharing(ctypes.Structure):
    """Parameters that end with the memory for stream-K's sums."""

    def share(self, partials: int, flags: int) -> None:
        """Set the addresses of the memory through which blocks hand sums to each other.

        Args:
            partials: address of float32 sums (:mod:`marlinq.kernels.driver.handover_memory`).
            flags: address of zeroed 32-bit words that announce them.
        """
        self.partials = partials
        self.flags = flags


class WarpgroupArguments(_Sharing):
    """The parameters of the warpgroup kernel: the bulk kernel's and the memory for stream-K's sums."""

    _fields_ = (*_MAPPED_FIELDS, *_HANDOVER_FIELDS)


class Fp8Arguments(_Sharing):
    """The parameters of the warpgroup kernel with FP8 activations (``cuda/kernels/warpgroup_fp8.cuh``)."""

    _fields_ = (
        ("x", ScaledActivationMaps),
        ("weight", WeightMaps),
        *((name, ctypes.c_void_p) for name in ("scales", "bias", "out")),
        *((name, ctypes.c_int) for name in _EXTENTS),
        ("out_stride", ctypes.c_longlong),
        ("dependent", ctypes.c_int),
        *_HANDOVER_FIELDS,
    )


Arguments = PlainArguments | MappedArguments | WarpgroupArguments
