"""8-bit integers, offset binary as in :data:`marlinq.core.scheme.INT8`, in the order of bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.formats.layouts.marlin import permute_scales
from marlinq.kernels.contract.weight_formats.byte_order import TILE_K, pack_bytes, unpack_bytes
from marlinq.kernels.contract.weight_formats.weight_format import WeightFormat, register_weight_format


def values(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [K, N] in ``dtype`` of words int32 [K/16, 4N]."""
    return unpack_bytes(words).to(dtype)


INT8 = register_weight_format(
    WeightFormat(
        name="int8",
        operator="int8_a16_gemm",
        bits=8,
        row_channels=TILE_K,
        scale="quant_group",
        midpoint=128.0,
        stores_zeros=True,
        values=values,
        pack=pack_bytes,
        in_order=permute_scales,
        codec="Int8",
        half_scale_power=8,
        # Eight weights: a shift, a mask and a subtraction a pair; bfloat16 takes the highest bit apart.
        unpack=(10, 18),
        # One pass orders the bytes (1 + 2); the power of two, zero points and scales take 4 each.
        dequantizing_bytes=15.0,
    )
)
