"""The tensors of one launch, and how the kernels take them as parameters."""

from __future__ import annotations

import struct
from typing import NamedTuple

from torch import Tensor

from marlinq.kernels.driver import TENSOR_MAP_BYTES, tensor_map

# Six pointers, M, N, K, four bytes of padding, two strides, a flag.
_PLAIN = struct.Struct("=6Q3i4x2qi")
# A tensor map, five pointers, M, N, K, four bytes of padding, a stride, a flag.
_MAPPED = struct.Struct(f"={TENSOR_MAP_BYTES}s5Q3i4xqi")


class Operands(NamedTuple):
    """What :func:`marlinq.kernels.launch.launch_gemm` is given, with two-dimensional ``x`` and ``out``."""

    x: Tensor
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    out: Tensor

    def plain_arguments(self, dependent: bool) -> bytes:
        """Parameters of a kernel that takes ``x`` by pointer and stride."""
        return _PLAIN.pack(
            self.x.data_ptr(),
            *self._pointers(),
            *self._extents(),
            self.x.stride(0),
            self.out.stride(0),
            dependent,
        )

    def mapped_arguments(self, tile_m: int, dependent: bool) -> bytes:
        """Parameters of a kernel that takes ``x`` as a tensor map with boxes of ``tile_m`` rows."""
        return _MAPPED.pack(
            tensor_map(self.x, tile_m), *self._pointers(), *self._extents(), self.out.stride(0), dependent
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
