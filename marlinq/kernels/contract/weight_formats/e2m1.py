"""FP4 E2M1 weights (MXFP4, NVFP4) in the order of ``cuda/codec/e2m1.cuh``.

Words are int32 [K/16, 2N], 128 of them a tile of 16 channels x 64 columns. Word 4 l + q of tile
(kt, nt), where lane l = 4 u + v, holds eight codes. Code 4 d + 2 h + e, with d, h, e in {0, 1}, is that of

    channel k = 16 kt + 8 d + 2 v + e        column n = 64 nt + 16 q + 8 h + u

Code j has its magnitude in bits 4j .. 4j + 2, and its sign in bit 8j + 7 (j < 4) or 8 (j - 4) + 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.float_elements import E2M1 as ELEMENT
from marlinq.formats.layouts.marlin import TILE_K, TILE_N, permute_scales
from marlinq.kernels.contract.weight_formats.weight_format import WeightFormat, register_weight_format

_SIGN, _MAGNITUDE = 8, 7


def pack_nibbles(codes: Tensor) -> Tensor:
    """Words int32 [K/16, 2N] of codes uint8 [K, N]; K a multiple of 16, N of 64."""
    k, n = codes.shape
    # [kt, d, v, e, nt, q, h, u]
    parts = codes.reshape(k // TILE_K, 2, 4, 2, n // TILE_N, 4, 2, 8)
    eight = parts.permute(0, 4, 7, 2, 5, 1, 6, 3).reshape(k // TILE_K, n * 2, 8)
    signs, magnitudes = eight & _SIGN, eight & _MAGNITUDE
    packed = magnitudes[..., ::2] | magnitudes[..., 1::2] << 4 | signs[..., :4] << 4 | signs[..., 4:]
    return packed.contiguous().view(torch.int32)[..., 0]


def unpack_nibbles(words: Tensor) -> Tensor:
    """Codes uint8 [K, N] of words int32 [K/16, 2N]; N is a multiple of 64, and words may be a strided
    view."""
    rows, columns = words.shape[0], words.shape[1] // 2
    packed = words.contiguous().view(torch.uint8).view(rows, columns * 2, 4)
    magnitudes = torch.stack((packed & _MAGNITUDE, packed >> 4 & _MAGNITUDE), dim=-1).flatten(2)
    eight = magnitudes | torch.cat((packed >> 4 & _SIGN, packed & _SIGN), dim=-1)
    # [kt, nt, u, v, q, d, h, e]
    parts = eight.view(rows, columns // TILE_N, 8, 4, 4, 2, 2, 2)
    return parts.permute(0, 5, 3, 7, 1, 4, 6, 2).reshape(rows * TILE_K, columns)


def values(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [K, N] in ``dtype`` of words int32 [K/16, 2N]; exact in every float of 16 bits."""
    return ELEMENT.decode(unpack_nibbles(words)).to(dtype)


E2M1 = register_weight_format(
    WeightFormat(
        name=ELEMENT.name,
        operator="fp4_a16_gemm",
        bits=4,
        row_channels=TILE_K,
        scale="quant_group",
        midpoint=0.0,
        stores_zeros=False,
        values=values,
        pack=pack_nibbles,
        in_order=permute_scales,
        codec="E2m1",
        half_scale_power=14,
        # For 8 weights: 2 masks, 3 shifts and masks for signs, a permute for every 4 weights and one a pair.
        unpack=(11, 13),
        # Bytes a weight: 10 for five passes that separate magnitudes and signs, 2 to order them,
        # 8 + 4 + 4 + 2 to look values up, 4 for scales.
        dequantizing_bytes=34.0,
        smallest_group=16,
    )
)
