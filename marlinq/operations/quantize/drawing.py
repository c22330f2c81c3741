"""Tokens drawn from what a model predicts."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(likely: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each row of probabilities, float [R, vocabulary], int64 [R]."""
    # The largest of probabilities over exponential draws falls on a token as often as it is likely.
    return (likely / torch.empty_like(likely).exponential_(generator=generator)).argmax(-1)
