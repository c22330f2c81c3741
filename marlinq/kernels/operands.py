"""The tensors of one launch, and how the kernels take them as parameters."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from marlinq.kernels.driver import TensorMap, tensor_map

_POINTERS = ("words", "scales", "zeros", "bias", "out")
_EXTENTS = ("m", "n", "k")
# What a block of a dependent launch brings to L2 while it waits: over 132 blocks, what device memory delivers
# in the three microseconds between one product's last weights and the next one's first activations.
_PREFETCH_BYTES = 96 * 1024


class PlainArguments(ctypes.Structure):
    """The parameters of a kernel that takes ``x`` by pointer and stride."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _EXTENTS),
        ("x_stride", ctypes.c_longlong),
        ("out_stride", ctypes.c_longlong),
        ("dependent", ctypes.c_int),
    )


class MappedArguments(ctypes.Structure):
    """The parameters of a kernel that takes ``x`` as a tensor map."""

    _fields_ = (
        ("x", TensorMap),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _EXTENTS),
        ("out_stride", ctypes.c_longlong),
        ("dependent", ctypes.c_int),
    )


class Operands(NamedTuple):
    """What :func:`marlinq.kernels.launch.launch_gemm` is given, with two-dimensional ``x`` and ``out``."""

    x: Tensor
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    out: Tensor

    def plain_arguments(self, dependent: bool) -> PlainArguments:
        """Parameters of a kernel that takes ``x`` by pointer and stride."""
        return PlainArguments(
            self.x.data_ptr(),
            *self._pointers(),
            *self._extents(),
            self.x.stride(0),
            self.out.stride(0),
            dependent,
        )

    def mapped_arguments(self, tile_m: int, step_bytes: int, dependent: bool) -> MappedArguments:
        """Parameters of a kernel that takes ``x`` as a tensor map with boxes of ``tile_m`` rows.

        A dependent launch brings as many steps of ``step_bytes`` of weights to L2 as ``_PREFETCH_BYTES``
        hold.
        """
        return MappedArguments(
            tensor_map(self.x, tile_m),
            *self._pointers(),
            *self._extents(),
            self.out.stride(0),
            1 + _PREFETCH_BYTES // step_bytes if dependent else 0,
        )

    def _pointers(self) -> tuple[int, int, int, int, int]:
        return (
            self.words.data_ptr(),
            self.scales.data_ptr(),
            0 if self.zeros is None else self.zeros.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            self.out.data_ptr(),
        )

    def _extents(self) -> tuple[int, int, int]:
        return self.x.shape[0], self.out.shape[1], self.x.shape[1]
