"""GPTQ as the paper's algorithm 1 states it: on the inverse's Cholesky factor, one column after another.

Everything is float64 and nothing is shared with the package but the min-max rule, so equal codes mean that
two different roads arrive at one solution.
"""

from __future__ import annotations

import torch
from torch import Tensor


def textbook_gptq(
    weight: Tensor, hessian: Tensor, *, group_size: int, symmetric: bool, damp: float
) -> Tensor:
    """Codes, int64 [K, N], with min-max scales from the updated weights."""
    w = weight.to(torch.float64).clone()
    n, k = w.shape
    g = k if group_size == -1 else group_size
    h = hessian.to(torch.float64).clone()
    h += damp * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    codes = torch.empty(k, n, dtype=torch.int64)
    for column in range(k):
        if column % g == 0:
            group = w[:, column : column + g]
            if symmetric:
                s = 2 * group.abs().amax(dim=1) / 15
                z = torch.full_like(s, 8)
            else:
                high, low = group.amax(dim=1).clamp(min=0), group.amin(dim=1).clamp(max=0)
                s = (high - low) / 15
                z = torch.round(-low / s.half())
            s = s.half().double()
        c = torch.clamp(torch.round(w[:, column] / s) + z, 0, 15)
        error = (w[:, column] - (c - z) * s) / u[column, column]
        w[:, column:] -= error[:, None] * u[column, column:]
        codes[column] = c.long()
    return codes


def layer_loss(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T) in float64."""
    d, w, h = (weight - quantized).double(), weight.double(), hessian.double()
    return float(((d @ h) * d).sum() / ((w @ h) * w).sum())
