"""4-bit integers in the Marlin layout (:mod:`marlinq.formats.layouts.marlin`)."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.formats.layouts.marlin import TILE_K, TILE_N, pack_tiles, permute_scales
from marlinq.kernels.contract.weight_formats.weight_format import WeightFormat, register_weight_format


def values(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [K, N] in ``dtype`` of words int32 [K/16, 2N], in few passes over memory.

    A tile is 16 channels x 64 columns. Its word 4t + q belongs to lane t = 4u + v: nibble h of byte 2l + j is
    the code of channel 8h + 2v + l and column 16q + 8j + u of the tile.
    """
    rows, columns = words.shape[0], words.shape[1] // 2
    # Axes: row of tiles, tile, u, v, q, l, j; two codes a byte.
    pairs = words.view(torch.uint8).reshape(rows, columns // TILE_N, 8, 4, 4, 2, 2)
    ordered = torch.empty((rows, 2, 4, 2, columns // TILE_N, 4, 2, 8), dtype=dtype, device=words.device)
    for half, codes in enumerate((pairs & 15, pairs >> 4)):
        ordered[:, half].copy_(codes.permute(0, 3, 5, 1, 4, 6, 2))
    return ordered.view(rows * TILE_K, columns)


INT4 = register_weight_format(
    WeightFormat(
        name="int4",
        operator="w4a16_gemm",
        bits=4,
        row_channels=TILE_K,
        scale="quant_group",
        midpoint=8.0,
        stores_zeros=True,
        values=values,
        pack=pack_tiles,
        in_order=permute_scales,
        codec="Int4",
        half_scale_power=0,
        # For 8 weights (a word): a shift, four masks, four subtractions; bfloat16 shifts every nibble down.
        unpack=(9, 11),
        # Bytes a weight: 1 + 1 for two passes that separate nibbles, 1 + 2 to order them, 4 for zero points,
        # 4 for scales.
        dequantizing_bytes=13.0,
        sums_codes=True,
        fuses=True,
    )
)
