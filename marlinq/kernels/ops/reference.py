"""The CPU reference of the GEMM: the same operands, plain torch arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.formats.layouts.marlin import unpack_tiles, unpermute_scales


def dequantize_operands(words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """The dense weight [K, N], float32, of words int32 [K/16, 2N], permuted scales [G, N] and zeros."""
    codes = unpack_tiles(words).to(torch.float32)
    k, n = codes.shape
    groups = scales.shape[0]
    grouped = codes.reshape(groups, k // groups, n)
    offset: Tensor | float = 8.0 if zeros is None else unpermute_scales(zeros).to(torch.float32)[:, None]
    return ((grouped - offset) * unpermute_scales(scales).to(torch.float32)[:, None]).reshape(k, n)


def reference_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    order: Tensor | None = None,
) -> Tensor:
    """``x @ W + bias`` accumulated in float32 and returned in ``x.dtype``; shapes as :func:`w4a16_gemm`."""
    weight = dequantize_operands(words, scales, zeros)
    if order is not None:
        x = x.index_select(-1, order.clamp(min=0)).masked_fill(order < 0, 0)
    out = (x.to(torch.float32) @ weight)[..., :out_features]
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(x.dtype)
