"""8-bit integers, offset binary as in :data:`marlinq.core.scheme.INT8`.

Codes lie in the byte order of :mod:`marlinq.kernels.contract.weight_formats.byte_order`.
"""

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
        # For 8 weights: a shift, a mask and a subtraction a pair; bfloat16 converts the highest bit by
        # itself.
        unpack=(10, 18),
        # Bytes a weight: 1 + 2 for the pass that orders the codes; 4 each for the power of two, zero points
        # and scales.
        dequantizing_bytes=15.0,
    )
)
