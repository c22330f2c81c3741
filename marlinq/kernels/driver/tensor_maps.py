"""Tensor maps of activations and weights for TMA copies (``cuda/tma/producer.cuh``)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from marlinq.kernels.contract.arguments import (
    TENSOR_MAP_BYTES,
    ActivationMaps,
    ScaledActivationMaps,
    WeightMaps,
)
from marlinq.kernels.driver.cuda_driver import encode_tensor_map

_ActivationMap = ctypes.c_ubyte * TENSOR_MAP_BYTES


# Maps hold addresses and extents only, so equal arguments give equal maps and the caches never go stale.
@lru_cache(maxsize=4096)
def activation_maps(address: int, m: int, k: int, stride: int, tile_m: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Two tensor maps of x [M, K]: with boxes of 64 columns x ``tile_m`` rows, and of 64 x (M % ``tile_m``).

    Rows of 128 bytes are stored swizzled. No box reaches beyond M rows: TMA's zero fill was measured slower
    than loading real rows (docs/kernels.md, "Rows beyond the batch").

    Args:
        address: address of the first element, a multiple of 16.
        m: rows.
        k: columns.
        stride: elements from one row to the next, a multiple of 8.
        tile_m: rows of a tile.
    """
    # A single row's stride is meaningless, and may be one that no map can hold.
    maps = _tile_and_rest(address, 2, m, k, stride if m > 1 else k, tile_m)
    return ActivationMaps.from_buffer_copy(maps)


@lru_cache(maxsize=4096)
def scaled_activation_maps(
    codes: int, scales: int, sums: int, m: int, k: int, parts: int, pitch: int, tile_m: int
) -> ctypes.Array[ctypes.c_ubyte]:
    """Maps of FP8 activations [M, K], of their scales and of their sums.

    Boxes are those of :func:`activation_maps`; of activations, they have 128 columns.

    Args:
        codes: address of the first code, a multiple of 16.
        scales: address of the first scale, a multiple of 16: float32 [parts, M].
        sums: address of the first sum, a multiple of 16: 16-bit elements [M, 64 for every 4096 columns or a
            part of them].
        m: rows.
        k: columns, a multiple of 128.
        parts: scales of a row.
        pitch: scales from one part to the next, a multiple of 4.
        tile_m: rows of a tile.
    """
    of_scales = encode_tensor_map(scales, 4, (m, parts), (4 * pitch,), (tile_m, 1), swizzled=False)
    width = 64 * -(-k // 4096)
    of_sums = _tile_and_rest(sums, 2, m, width, width, tile_m)
    return ScaledActivationMaps.from_buffer_copy(
        _tile_and_rest(codes, 1, m, k, k, tile_m) + of_scales + of_sums
    )


def _tile_and_rest(address: int, channel_bytes: int, m: int, k: int, stride: int, tile_m: int) -> bytes:
    """Two maps of rows with boxes of 128 bytes: of a tile's rows, and of the rows that remain behind whole
    tiles, which is left zero where none do."""
    maps = b"".join(
        encode_tensor_map(
            *(address, channel_bytes, (k, m), (channel_bytes * stride,), (128 // channel_bytes, rows)),
            swizzled=True,
        )
        for rows in ((tile_m, m % tile_m) if m > tile_m and m % tile_m else (min(tile_m, m),))
    )
    return maps.ljust(2 * TENSOR_MAP_BYTES, b"\0")


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
    words: int,
    scales: int,
    zeros: int,
    n: int,
    k: int,
    groups: int,
    tiles: int,
    rows: int,
    tile_words: int,
    row_channels: int,
) -> ctypes.Array[ctypes.c_ubyte]:
    """Words [K / row_channels, N/64, words of a tile], then scales and zero points [G, N/64, 64] of groups.

    Boxes have ``tiles`` tiles of 64 columns and ``rows`` times 16 channels.
    """
    maps = encode_tensor_map(
        words,
        4,
        (tile_words, n // 64, k // row_channels),
        (4 * tile_words, tile_words * n // 16),
        (tile_words, tiles, 16 * rows // row_channels),
        swizzled=False,
    )
    in_box = max(1, 16 * rows * groups // k)
    for address in (scales, zeros):
        if groups == 1 or not address:
            maps += bytes(TENSOR_MAP_BYTES)
        else:
            maps += encode_tensor_map(
                address, 2, (64, n // 64, groups), (128, 2 * n), (64, tiles, in_box), swizzled=False
            )
    return WeightMaps.from_buffer_copy(maps)
