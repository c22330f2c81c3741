"""The CPU reference of the GEMM, in plain torch arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.launch.eight_bit_product import quantize_rows


def reference_gemm(x: Tensor, weight: Operand, bias: Tensor | None, out_features: int) -> Tensor:
    """The first ``out_features`` columns of ``x @ W + bias``, accumulated in float32, in ``x.dtype``.

    Args:
        x: [..., K]; any number of columns if the weight has an order.
        weight: weight on the device of ``x``.
        bias: [out_features], or None.
        out_features: at most the weight's padded columns.
    """
    order = weight.order
    if order is not None:
        x = x.index_select(-1, order.clamp(min=0)).masked_fill(order < 0, 0)
    out = (x.to(torch.float32) @ weight.dequantize(torch.float32))[..., :out_features]
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(x.dtype)


def reference_rounded_gemm(
    x: Tensor,
    weight: Operand,
    bias: Tensor | None,
    out_features: int,
    input_scale: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """As :func:`reference_gemm` with activations rounded to E4M3; the weight has no order.

    Activations have one scale per row and ``group`` channels, per row where it is 0. ``input_scale``,
    float32 [], is used for all of them instead.
    """
    k, n = weight.padded_shape
    codes, row_scales = quantize_rows(x.reshape(-1, k), group, input_scale)
    rounded = (codes.float().view(len(codes), -1, group or k) * row_scales[..., None]).view(-1, k)
    out = rounded @ weight.dequantize(torch.float32)
    if bias is not None:
        out[:, : len(bias)] += bias.float()
    memory = x.new_empty((*x.shape[:-1], n))
    memory.copy_(out.view(memory.shape))
    return memory[..., :out_features]
