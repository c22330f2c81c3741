"""Attention with the same bits each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.operations.quantize.reproducible import (
    _OrderedAttention,
    reproducible,
    reproducible_attention,
)

HEADS, SHARED = 9, 3


def operands(batch: int, tokens: int, device: str, dtype: torch.dtype, channels: int = 64) -> list[Tensor]:
    """Query, key and value, of which a backward pass is wanted."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            batch, heads, tokens, channels, generator=generator, device=device, dtype=dtype
        ).requires_grad_()
        for heads in (HEADS, SHARED, SHARED)
    ]


def own_heads(shared: Tensor) -> Tensor:
    """Keys or values of every head."""
    return shared.detach().repeat_interleave(HEADS // SHARED, dim=1).requires_grad_()


def ordered() -> tuple[bool, bool]:
    """Whether operations without a fixed order raise, and whether a wish for order is in force at all."""
    asked = torch.are_deterministic_algorithms_enabled()
    return asked and not torch.is_deterministic_algorithms_warn_only_enabled(), asked


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("masked", ["causal", "one for all", "one a row", "one a head", "no"])
@pytest.mark.parametrize("channels", [64, 20])
def test_ordered_attention_is_torchs(shared: bool, masked: str, channels: int) -> None:
    query, key, value = operands(4, 16, "cpu", torch.float64, channels)
    if not shared:
        key, value = own_heads(key), own_heads(value)
    leaves = [query, key, value]
    options: dict[str, Any] = {"scale": 0.2, "enable_gqa": shared}
    shape = {"one for all": (16, 16), "one a row": (4, 1, 16, 16), "one a head": (1, HEADS, 16, 16)}.get(
        masked
    )
    if shape is not None:
        options["attn_mask"] = torch.randn(
            shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
    options["is_causal"] = masked == "causal"
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    with reproducible(torch.device("cpu")), _OrderedAttention():
        found = F.scaled_dot_product_attention(query, key, value, **options)
        mine = torch.autograd.grad(found.square().sum(), leaves)
    with torch.no_grad(), _OrderedAttention():
        assert not F.scaled_dot_product_attention(query, key, value, **options).requires_grad
    # Sums of 64 and of 16 products in another order, of values of some tens.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for one, other in zip(mine, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_order_is_in_force_for_attention_alone() -> None:
    query, key, value = operands(1, 16, "cpu", torch.float32)
    seen = {}
    with reproducible(torch.device("cpu")), _OrderedAttention():
        found = F.scaled_dot_product_attention(query * 1, key, value, is_causal=True, enable_gqa=True)
        node = found.grad_fn
        assert node is not None
        node.register_prehook(lambda *_: seen.update(inside=ordered()))
        behind = found * 1
        assert behind.grad_fn is not None
        behind.grad_fn.register_prehook(lambda *_: seen.update(behind=ordered()))
        query.register_hook(lambda *_: seen.update(before=ordered()))
        behind.sum().backward()
        seen["afterwards"] = ordered()
    assert seen == {
        "behind": (False, True),
        "inside": (True, True),
        "before": (False, True),
        "afterwards": (False, True),
    }
    assert ordered() == (False, False)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (torch.bfloat16, False, "Flash"),
        (torch.bfloat16, True, "Efficient"),
        (torch.float32, False, "Efficient"),
        (torch.float32, True, "Efficient"),
    ],
)
def test_a_gpus_attention_has_the_same_gradients_each_time(
    shared: bool, dtype: torch.dtype, masked: bool, kernel: str
) -> None:
    device = torch.device("cuda")
    query, key, value = operands(16, 512, "cuda", dtype)
    if not shared:
        key, value = own_heads(key), own_heads(value)
    leaves = [query, key, value]
    slope = torch.randn_like(query)
    options: dict[str, Any] = {"is_causal": not masked, "enable_gqa": shared}
    if masked:
        options["attn_mask"] = torch.ones(16, 1, 512, 512, dtype=torch.bool, device="cuda").tril()
    found = []
    # Other work on the GPU, so that thread blocks don't end in the order they began in.
    beside, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    with reproducible(device), reproducible_attention(device):
        for _ in range(100):
            with torch.cuda.stream(beside):
                square = square @ square / square.norm()
            out = F.scaled_dot_product_attention(query, key, value, **options)
            assert out.grad_fn is not None
            assert kernel in out.grad_fn.name()
            found.append(torch.autograd.grad(out, leaves, slope))
    assert all(torch.equal(one, first) for each in found for one, first in zip(each, found[0], strict=True))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(
        F.scaled_dot_product_attention(exact[0], exact[1], exact[2], **options), exact, slope.double()
    )
    # Probabilities, their slopes and the result are rounded to the dtype, products of float32 to TF32 or
    # better: some half units of 2^-8 or 2^-10 of values that go on to be added up.
    bound = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
    for one, other in zip(found[0], expected, strict=True):
        assert (one.double() - other).norm() <= bound * other.norm()
