"""Attention with the same bits each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.operations.quantize import reproducible as module
from marlinq.operations.quantize.reproducible import _PlainAttention, reproducible, reproducible_attention

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


def own_heads(shared: Tensor) -> Tensor:
    """Keys or values of every head."""
    return shared.detach().repeat_interleave(HEADS // SHARED, dim=1).requires_grad_()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("masked", ["causal", "one for all", "one a row", "one a head", "no"])
# Scores of a row are 9 heads' 256 of 4 bytes: room for all, two rows, three heads, less than one; with keys
# that three heads share, and without.
@pytest.mark.parametrize(
    ("most", "pieces"), [(36864, (1, 1)), (20000, (2, 2)), (3072, (12, 12)), (1, (12, 36))]
)
def test_attention_in_pieces_is_the_same(
    monkeypatch: pytest.MonkeyPatch, shared: bool, masked: str, most: int, pieces: tuple[int, int]
) -> None:
    query, key, value = operands(4, 16, "cpu", torch.float64)
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
    called: list[tuple[int, ...]] = []
    plain = module._plain

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        called.append((*args[0].shape[:2], args[1].shape[1]))
        return plain(*args, **kwargs)

    monkeypatch.setattr(module, "_plain", counted)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    with _PlainAttention(most):
        found = F.scaled_dot_product_attention(query, key, value, **options)
        count = pieces[not shared]
        assert len(called) == count
        assert all(heads // keys == (3 if shared else 1) for _, heads, keys in called)
        assert sum(rows * heads for rows, heads, _ in called) == 4 * HEADS
        mine = torch.autograd.grad(found.square().sum(), leaves)
    # What is in pieces is computed again.
    assert len(called) == count * (2 if count > 1 else 1)
    with torch.no_grad(), _PlainAttention(most):
        assert not F.scaled_dot_product_attention(query, key, value, **options).requires_grad
    # Sums of 64 and of 16 products in another order, of values of some tens.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for one, other in zip(mine, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_a_gpus_attention_has_the_same_gradients_each_time(shared: bool) -> None:
    device = torch.device("cuda")
    query, key, value = operands(16, 512, "cuda", torch.bfloat16)
    if not shared:
        key, value = own_heads(key), own_heads(value)
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
