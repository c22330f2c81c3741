"""Tensor maps of activations and weights for TMA copies (``cuda/tma/producer.cuh``)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from marlinq.kernels.contract.arguments import TENSOR_MAP_BYTES, ActivationMaps, WeightMaps
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
    row_bytes = 2 * (stride if m > 1 else k)
    maps = b"".join(
        encode_tensor_map(address, 2, (k, m), (row_bytes,), (64, rows), swizzled=True)
        for rows in ((tile_m, m % tile_m) if m > tile_m and m % tile_m else (min(tile_m, m),))
    )
    return ActivationMaps.from_buffer_copy(maps.ljust(2 * TENSOR_MAP_BYTES, b"\0"))


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
