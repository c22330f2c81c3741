"""The order of 8-bit codes in kernels' words (``cuda/codec/byte_order.cuh``).

Words are int32 [K/16, 4N], 256 of them a tile of 16 channels x 64 columns. Word 128 p + 4 l + 2 i + h of tile
(kt, nt), with p, i, h in {0, 1} and lane l = 4 u + v, belongs to column

    n = 64 nt + 32 p + 16 i + 8 h + u

and its byte 2 c + d, with c, d in {0, 1}, to channel k = 16 kt + 8 d + 2 v + c.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_K, TILE_N = 16, 64


def pack_bytes(codes: Tensor) -> Tensor:
    """Words int32 [K/16, 4N] of codes uint8 [K, N]; K a multiple of 16, N of 64."""
    k, n = codes.shape
    # [kt, d, v, c, nt, p, i, h, u]
    parts = codes.reshape(k // TILE_K, 2, 4, 2, n // TILE_N, 2, 2, 2, 8)
    ordered = parts.permute(0, 4, 5, 8, 2, 6, 7, 3, 1).reshape(k // TILE_K, 16 * n)
    return ordered.view(torch.int32)


def unpack_bytes(words: Tensor) -> Tensor:
    """Codes uint8 [K, N] of words int32 [K/16, 4N]; N is a multiple of 64, and words may be a strided
    view."""
    rows, columns = words.shape[0], words.shape[1] // 4
    # [kt, nt, p, u, v, i, h, c, d]
    parts = words.contiguous().view(torch.uint8).view(rows, columns // TILE_N, 2, 8, 4, 2, 2, 2, 2)
    return parts.permute(0, 8, 4, 7, 1, 2, 5, 6, 3).reshape(rows * TILE_K, columns)
