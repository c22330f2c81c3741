"""Random layers with the statistics of trained models."""

from __future__ import annotations

import torch
from torch import Tensor

_STEEPNESS = 1.2


def realistic_layer(
    in_features: int, out_features: int, seed: int, *, dominant: int = 2, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """(weight, float32 [N, K] with values of ``dtype``; Hessian of its inputs, float32 [K, K]).

    Weights have Student t tails and output channels of different sizes, some of them many times larger. The
    inputs' covariance has a spectrum that falls like a power, channels of different sizes, and ``dominant``
    channels a hundred times larger than the others.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    k, n = in_features, out_features
    tails = torch.stack([normal(n, k).square() for _ in range(5)]).mean(dim=0).sqrt()
    weight = 0.03 * normal(n, k) / tails * torch.exp(0.3 * normal(n, 1)) * torch.exp(0.2 * normal(1, k))
    outliers = torch.randperm(n, generator=generator)[: max(1, n // 128)]
    weight[outliers] *= 4 + 4 * torch.rand(len(outliers), 1, generator=generator)
    weight[outliers, torch.randint(k, (len(outliers),), generator=generator)] *= 8

    spectrum = torch.arange(1, k + 1).pow(-_STEEPNESS)
    # Four sparse rotations mix channels as well as a dense one, in far less time.
    mixing = torch.diag(spectrum.sqrt())
    for _ in range(4):
        order = torch.randperm(k, generator=generator)
        angle = (torch.rand(k // 2, 1, generator=generator) * 6.2832).expand(-1, k)
        one, other = mixing[order[0 : k // 2]], mixing[order[k // 2 : 2 * (k // 2)]]
        mixing[order[0 : k // 2]] = angle.cos() * one - angle.sin() * other
        mixing[order[k // 2 : 2 * (k // 2)]] = angle.sin() * one + angle.cos() * other
    sizes = torch.exp(0.7 * normal(k))
    sizes[torch.randperm(k, generator=generator)[:dominant]] *= 100
    root = sizes.unsqueeze(1) * mixing
    return weight.to(dtype).float(), root @ root.t() + 1e-4 * torch.diag(sizes.square())
