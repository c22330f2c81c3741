"""Attention with the same bits each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from marlinq.operations.quantize.reproducible import _OwnHeads, reproducible, reproducible_attention

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


class Told(TorchFunctionMode):
    """Notes what attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[int] = []
        self.named: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.heads.append(args[1].shape[-3])
            self.named.append(kwargs)
        return func(*args, **(kwargs or {}))


def test_shared_keys_and_values_become_each_heads_own() -> None:
    query, key, value = operands(2, 16, "cpu", torch.float32)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(expected.square().sum(), [query, key, value])
    with Told() as told, _OwnHeads():
        found = F.scaled_dot_product_attention(
            query=query, key=key, value=value, is_causal=True, enable_gqa=True
        )
        mine = torch.autograd.grad(found.square().sum(), [query, key, value])
        F.scaled_dot_product_attention(query, query, query, None, 0.0, is_causal=True)
    assert told.heads == [HEADS, HEADS]
    assert told.named == [{"is_causal": True}] * 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(mine, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


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
    with reproducible(device), reproducible_attention(device):
        for _ in range(20):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
            found.append(torch.autograd.grad(out, [query, key, value], slope))
    assert all(torch.equal(one, first) for each in found for one, first in zip(each, found[0], strict=True))
