"""FP8 E4M3 weights in the byte order of :mod:`marlinq.kernels.contract.weight_formats.byte_order`."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.float_elements import E4M3 as ELEMENT
from marlinq.formats.layouts.marlin import permute_scales
from marlinq.kernels.contract.weight_formats.byte_order import TILE_K, pack_bytes, unpack_bytes
from marlinq.kernels.contract.weight_formats.weight_format import WeightFormat, register_weight_format


def values(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [K, N] in ``dtype`` of words int32 [K/16, 4N]; exact in every float of 16 bits."""
    return unpack_bytes(words).view(torch.float8_e4m3fn).to(dtype)


E4M3 = register_weight_format(
    WeightFormat(
        name=ELEMENT.name,
        operator="fp8_a16_gemm",
        bits=8,
        row_channels=TILE_K,
        scale="quant_group",
        midpoint=0.0,
        stores_zeros=False,
        values=values,
        pack=pack_bytes,
        in_order=permute_scales,
        codec="E4m3",
        half_scale_power=8,
        # For 8 weights: a shift and two masks a pair, another shift every second pair; bfloat16 also
        # multiplies each pair.
        unpack=(14, 18),
        # Bytes a weight: 1 + 2 for the pass that orders the codes, 4 for the power of two, 4 for scales.
        dequantizing_bytes=11.0,
        largest_bfloat16_scale=2.0**8,
    )
)
