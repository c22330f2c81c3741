"""The CPU reference of the GEMM, in plain torch arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.kernels.contract.operand import Operand


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
