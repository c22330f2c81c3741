"""A random layer with correlated inputs, outlier channels and heavy-tailed weights."""

from __future__ import annotations

import torch
from torch import Tensor


def make_layer(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, float32 [N, K], and the Hessian of its input, float32 [K, K]."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    spread = torch.exp(torch.randn(k, generator=generator))
    x = (torch.randn(4 * k, k, generator=generator) @ mixing) * spread
    weight = torch.randn(n, k, generator=generator)
    weight = weight * (1 + 2 * torch.rand(n, k, generator=generator).pow(8))
    return weight * 0.05, x.t() @ x
