"""The CPU reference of the GEMM: the same operands, plain torch arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.kernels.contract.weight_formats import INT4, WeightFormat


def dequantize_operands(
    words: Tensor, scales: Tensor, zeros: Tensor | None, weight_format: WeightFormat = INT4
) -> Tensor:
    """The dense weight [K, N], float32, of words, scales and zero points [G, N] in stored order."""
    return weight_format.dequantize(words, scales, zeros, torch.float32)


def reference_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    order: Tensor | None = None,
    weight_format: WeightFormat = INT4,
) -> Tensor:
    """``x @ W + bias`` accumulated in float32 and returned in ``x.dtype``; shapes as :func:`w4a16_gemm`."""
    weight = dequantize_operands(words, scales, zeros, weight_format)
    if order is not None:
        x = x.index_select(-1, order.clamp(min=0)).masked_fill(order < 0, 0)
    out = (x.to(torch.float32) @ weight)[..., :out_features]
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(x.dtype)
