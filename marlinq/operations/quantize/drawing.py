"""Draws tokens from a model's predictions."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(likely: Tensor, generator: torch.Generator) -> Tensor:
    """One token (int64 [R]) for each row of probabilities ``likely`` (float [R, vocabulary])."""
    # Exponential race: argmax of p_i / E_i, with E_i drawn from Exp(1), is i with probability p_i.
    return (likely / torch.empty_like(likely).exponential_(generator=generator)).argmax(-1)
