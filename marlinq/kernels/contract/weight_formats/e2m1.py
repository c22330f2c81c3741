"""FP4 E2M1 weights (MXFP4, NVFP4) in the Marlin layout."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.float_elements import E2M1 as ELEMENT
from marlinq.formats.layouts.marlin import TILE_K, pack_tiles, permute_scales
from marlinq.kernels.contract.weight_formats import int4
from marlinq.kernels.contract.weight_formats.weight_format import WeightFormat, register_weight_format


def values(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [K, N] in ``dtype`` of words int32 [K/16, 2N]; exact in every float of 16 bits."""
    return ELEMENT.decode(int4.values(words, torch.uint8)).to(dtype)


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
        pack=pack_tiles,
        in_order=permute_scales,
        codec="E2m1",
        half_scale_power=14,
        # Eight weights: two shifts and two masks a pair, a shift less for the highest.
        unpack=(15, 19),
        # Nibbles are parted and ordered as for integers (5), the table's index and floats take 8 + 4 + 4 + 2,
        # the power of two and scales 4 each.
        dequantizing_bytes=31.0,
        smallest_group=16,
        largest_bfloat16_scale=2.0**2,
    )
)
