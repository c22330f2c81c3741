"""Attention with the same bits each time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.operations.quantize.reproducible import reproducible, reproducible_attention

HEADS, SHARED = 9, 3


def operands(batch: int, tokens: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value, of which a backward pass is wanted."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            batch, heads, tokens, 64, generator=generator, device=device, dtype=dtype
        ).requires_grad_()
        for heads in (HEADS, SHARED, SHARED)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_a_gpus_attention_has_the_same_gradients_each_time(shared: bool) -> None:
    device = torch.device("cuda")
    query, key, value = operands(16, 512, "cuda", torch.bfloat16)
    if not shared:
        key, value = (
            each.detach().repeat_interleave(HEADS // SHARED, dim=1).requires_grad_() for each in (key, value)
        )
    slope = torch.randn_like(query)
    found = []
    # Other work on the GPU, so that thread blocks don't end in the order they began in.
    beside, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    with reproducible(device), reproducible_attention(device):
        for _ in range(20):
            with torch.cuda.stream(beside):
                square = square @ square / square.norm()
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
            found.append(torch.autograd.grad(out, [query, key, value], slope))
    assert all(torch.equal(one, first) for each in found for one, first in zip(each, found[0], strict=True))
