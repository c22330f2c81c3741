"""The tensors of one launch, and how the kernels take them as parameters."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from marlinq.kernels.launch.driver import TENSOR_MAP_BYTES, encode_tensor_map

_EXTENTS = ("m", "n", "k")
_ActivationMaps = ctypes.c_ubyte * (2 * TENSOR_MAP_BYTES)
_ActivationMap = ctypes.c_ubyte * TENSOR_MAP_BYTES
_WeightMaps = ctypes.c_ubyte * (3 * TENSOR_MAP_BYTES)


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
    ("x", _ActivationMaps),
    ("weight", _WeightMaps),
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
        """Say where blocks leave sums for each other (:mod:`marlinq.kernels.launch.handover`)."""
        self.partials = partials
        self.flags = flags


Arguments = PlainArguments | MappedArguments | WarpgroupArguments


class Operands(NamedTuple):
    """What :func:`marlinq.kernels.launch.launch_gemm` is given, with two-dimensional ``x`` and ``out``.

    ``out`` has a column for every column of the weight, or half as many behind an activation.
    """

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
            self.words.data_ptr(),
            *self._small(),
            *self._extents(),
            self.x.stride(0),
            self.out.stride(0),
            dependent,
        )

    def mapped_arguments(self, tile_m: int, tiles: int, rows: int, dependent: bool) -> MappedArguments:
        """Parameters of the bulk kernel, whose stages are filled by tensor copies.

        Args:
            tile_m: rows of activations in a stage.
            tiles: 64-column tiles of weights in a stage.
            rows: rows of 16 channels in a stage.
            dependent: whether the kernel is launched to overlap with the previous one.
        """
        return MappedArguments(*self._mapped(tile_m, tiles, rows, dependent))

    def warpgroup_arguments(self, tile_m: int, tiles: int, rows: int, dependent: bool) -> WarpgroupArguments:
        """As :meth:`mapped_arguments`, of the warpgroup kernel, with no place for sums that blocks share."""
        return WarpgroupArguments(*self._mapped(tile_m, tiles, rows, dependent))

    def _mapped(self, tile_m: int, tiles: int, rows: int, dependent: bool) -> tuple[object, ...]:
        m, n, k = self._extents()
        small = self._small()
        return (
            activation_maps(self.x.data_ptr(), m, k, self.x.stride(0), tile_m),
            weight_maps(self.words.data_ptr(), *small[:2], n, k, self.scales.shape[0], tiles, rows),
            *small,
            m,
            n,
            k,
            self.out.stride(0),
            dependent,
        )

    def _small(self) -> tuple[int, int, int, int]:
        return (
            self.scales.data_ptr(),
            0 if self.zeros is None else self.zeros.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            self.out.data_ptr(),
        )

    def _extents(self) -> tuple[int, int, int]:
        return self.x.shape[0], self.scales.shape[1], self.x.shape[1]


# Maps hold addresses and extents only, so equal arguments give equal maps and the caches never go stale.
@lru_cache(maxsize=4096)
def activation_maps(address: int, m: int, k: int, stride: int, tile_m: int) -> ctypes.Array[ctypes.c_ubyte]:
    """x [M, K] in boxes of 64 columns and a tile's rows, then in boxes of those that whole tiles leave.

    Rows of 128 bytes land swizzled. No box has rows beyond x: they would arrive as zeros, but later than rows
    that exist (docs/kernels.md, "Rows beyond the batch").

    Args:
        address: of the first element, a multiple of 16.
        m: rows.
        k: columns.
        stride: elements from one row to the next, a multiple of 8.
        tile_m: rows of a tile.
    """
    # A single row may have any stride, also one that no map can hold.
    row_bytes = 2 * (stride if m > 1 else k)
    maps = b"".join(
        encode_tensor_map(address, 2, (k, m), (row_bytes,), (64, rows), swizzled=True)
        for rows in ((tile_m, m % tile_m) if m > tile_m and m % tile_m else (min(tile_m, m),))
    )
    return _ActivationMaps.from_buffer_copy(maps.ljust(2 * TENSOR_MAP_BYTES, b"\0"))


@lru_cache(maxsize=4096)
def sorted_rows_map(
    address: int, rows: int, k: int, tile_m: int, stride: int
) -> ctypes.Array[ctypes.c_ubyte]:
    """Activations [rows, K] in boxes of 64 columns and ``tile_m`` rows, which may begin at any row.

    ``stride``: elements from one row to the next, a multiple of 8.
    """
    box = (64, tile_m)
    return _ActivationMap.from_buffer_copy(
        encode_tensor_map(address, 2, (k, rows), (2 * stride,), box, swizzled=True)
    )


@lru_cache(maxsize=16384)
def weight_maps(
    words: int, scales: int, zeros: int, n: int, k: int, groups: int, tiles: int, rows: int
) -> ctypes.Array[ctypes.c_ubyte]:
    """Words [K/16, N/64, 128], then scales and zero points [G, N/64, 64] where they travel in groups."""
    maps = encode_tensor_map(
        words, 4, (128, n // 64, k // 16), (512, 8 * n), (128, tiles, rows), swizzled=False
    )
    in_box = max(1, 16 * rows * groups // k)
    for address in (scales, zeros):
        if groups == 1 or not address:
            maps += bytes(TENSOR_MAP_BYTES)
        else:
            maps += encode_tensor_map(
                address, 2, (64, n // 64, groups), (128, 2 * n), (64, tiles, in_box), swizzled=False
            )
    return _WeightMaps.from_buffer_copy(maps)
