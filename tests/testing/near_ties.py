"""Recognises near ties, where two computations of one model may choose different tokens."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def is_near_tie(model: PreTrainedModel, ids: list[int]) -> bool:
    """Whether float16 may choose another next token: two logits within 2 % of the largest."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return first - second < 0.02 * float(logits.abs().max())
