"""The short convolution over time in front of a recurrent mixer."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The causal depthwise convolution of ``x`` [B, T, C], which follows ``before`` [B, taps - 1, C].

    Sums are float32 and rounded to the dtype of ``x`` once.

    Args:
        x: inputs.
        before: inputs of the tokens before.
        weight: float32 [C, taps]; the last tap is the newest token's.
        bias: float32 [C], added to the sums; or None.
    """
    tokens = x.shape[1]
    seen = torch.cat((before, x), 1).float()
    total = torch.zeros_like(seen[:, :tokens])
    for tap in range(weight.shape[1]):
        total += seen[:, tap : tap + tokens] * weight[:, tap]
    if bias is not None:
        total += bias
    return total.to(x.dtype)
