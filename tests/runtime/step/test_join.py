"""Joined projections hold the weights of their parts, and the model keeps its results."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn

from marlinq.kernels import Operand
from marlinq.kernels.contract.weight_formats import INT4_SPARSE
from marlinq.runtime import QuantLinear, marlin_operand
from marlinq.runtime.step.join import (
    JoinedLinear,
    JoinedSlice,
    join_modules,
    join_operands,
    join_refusal,
)
from tests.kernels.sparse_problems import random_sparse
from tests.testing.runnable_folders import random_tuple

_seeds = itertools.count()


def linear(k: int, n: int, *, group_size: int = 32, bias: bool = False, **scheme: bool) -> QuantLinear:
    """A random packed linear on the CPU, in float32."""
    q = random_tuple(k, n, group_size=group_size, seed=next(_seeds), **scheme)
    return QuantLinear(marlin_operand(q, torch.float32), torch.randn(n) if bias else None)


class Attention(nn.Module):
    """Three projections of one input."""

    def __init__(self, *linears: QuantLinear) -> None:
        super().__init__()
        for name, found in zip(("q", "k", "v"), linears, strict=False):
            setattr(self, name, found)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x) for module in self.children()]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of every joined product that is computed."""
    found: list[int] = []
    forward = JoinedLinear.forward

    def counted(self: JoinedLinear, x: Tensor) -> Tensor:
        found.append(self.out_features)
        return forward(self, x)

    monkeypatch.setattr(JoinedLinear, "forward", counted)
    return found


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("interleave", [False, True])
def test_products_of_the_parts_have_the_same_bits(interleave: bool, symmetric: bool, group_size: int) -> None:
    widths = (100, 100, 100) if interleave else (128, 64, 100)
    parts = [linear(96, n, group_size=group_size, symmetric=symmetric, bias=n != 64) for n in widths]
    model = Attention(*parts)
    x = torch.randn(2, 3, 96)
    expected = [part(x) for part in parts]
    joined = join_modules(model, ("q", "k", "v"), interleave=interleave)
    assert isinstance(joined, JoinedLinear)
    # Sums of a matrix product may be taken in another order where it has other columns.
    for found, wanted in zip(model(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert join_modules(model, ("q", "k", "v"), interleave=interleave) is joined
    assert join_modules(model, ("q", "k", "v"), interleave=not interleave) == "q is joined otherwise already"


@pytest.mark.parametrize("interleave", [False, True])
def test_sparse_parts_are_joined(interleave: bool) -> None:
    widths = (100, 100, 100) if interleave else (128, 64, 100)
    weights = [random_sparse(96, n, 32, seed=seed) for seed, n in enumerate(widths)]
    parts = [QuantLinear(marlin_operand(each, torch.float32, weight_format=INT4_SPARSE)) for each in weights]
    model = Attention(*parts)
    x = torch.randn(2, 3, 96)
    expected = [part(x) for part in parts]
    assert isinstance(join_modules(model, ("q", "k", "v"), interleave=interleave), JoinedLinear)
    for found, wanted in zip(model(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_tiles_take_turns() -> None:
    gate, up = (
        marlin_operand(random_tuple(64, 128, group_size=32, seed=seed), torch.float16) for seed in (1, 2)
    )
    joined = join_operands((gate, up), interleave=True)
    for tile, source in enumerate((gate, up, gate, up)):
        place = tile // 2
        assert torch.equal(joined.words[:, 128 * tile :][:, :128], source.words[:, 128 * place :][:, :128])
        assert torch.equal(joined.scales[:, 64 * tile :][:, :64], source.scales[:, 64 * place :][:, :64])


def test_siblings_share_one_product(products: list[int]) -> None:
    model = Attention(linear(64, 64), linear(64, 64), linear(64, 64))
    join_modules(model, ("q", "k", "v"), interleave=False)
    x = torch.randn(2, 64)
    model(x)
    assert len(products) == 1
    model(x)
    assert len(products) == 2


def test_a_changed_input_is_multiplied_again(products: list[int]) -> None:
    model = Attention(linear(64, 64), linear(64, 64), linear(64, 64))
    join_modules(model, ("q", "k", "v"), interleave=False)
    x = torch.randn(2, 64)
    q, k = model.get_submodule("q"), model.get_submodule("k")
    before = q(x)
    x.mul_(2)
    assert torch.equal(k(x), k(x.clone()))
    assert torch.equal(q(x), 2 * before)
    # A part that asks twice has not waited for its siblings.
    q(x)
    assert len(products) == 5


def test_inference_tensors_are_multiplied_right() -> None:
    model = Attention(linear(64, 64), linear(64, 64), linear(64, 64))
    x = torch.randn(2, 64)
    expected = model(x)
    join_modules(model, ("q", "k", "v"), interleave=False)
    with torch.inference_mode():
        x = x.clone()
        found = model(x)
        first = model.get_submodule("q")(x)
        x.zero_()
        assert not model.get_submodule("k")(x).any()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(first, expected[0])


def test_a_product_is_forgotten_with_its_input() -> None:
    model = Attention(linear(64, 64), linear(64, 64), linear(64, 64))
    joined = join_modules(model, ("q", "k", "v"), interleave=False)
    assert isinstance(joined, JoinedLinear)
    x = torch.randn(2, 64)
    model.get_submodule("q")(x)
    assert joined._last is not None
    del x
    assert joined._last is None


def test_the_words_exist_once_and_move_together() -> None:
    model = Attention(linear(64, 64, bias=True), linear(64, 64), linear(64, 128))
    joined = join_modules(model, ("q", "k", "v"), interleave=False)
    assert isinstance(joined, JoinedLinear)
    assert model.state_dict() == {}
    assert len(dict(model.named_buffers())) == 3
    model.get_submodule("q")(torch.randn(1, 64))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        parts = [module for module in copied.children() if isinstance(module, JoinedSlice)]
        assert len({id(part.joined) for part in parts}) == 1
        x = torch.randn(3, 64)
        for found, wanted in zip(copied(x), model(x), strict=True):
            assert torch.equal(found, wanted)
    assert model.to(torch.bfloat16).get_submodule("k").joined.scales.dtype == torch.bfloat16
    assert "part 2 of JoinedLinear" in repr(model)


def operand(k: int = 128, n: int = 64, *, group_size: int = 32, **scheme: bool) -> Operand:
    """A random operand of float16."""
    return marlin_operand(random_tuple(k, n, group_size=group_size, **scheme), torch.float16)


@pytest.mark.parametrize(
    ("other", "interleave", "reason"),
    [
        ({"group_size": 64}, False, "groups of 32 and groups of 64"),
        ({"symmetric": False}, False, "zero points"),
        ({"act_order": True}, True, "activation order"),
        ({"k": 64}, True, "inputs of 128 and 64 channels"),
        ({"n": 128}, True, "can't take turns"),
    ],
)
def test_projections_that_do_not_fit_stay_apart(other: dict[str, int], interleave: bool, reason: str) -> None:
    found = join_refusal((operand(), operand(**other)), interleave=interleave)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=reason):
        join_operands((operand(), operand(**other)), interleave=interleave)


def test_padding_inside_a_row_is_refused_side_by_side() -> None:
    assert "whole tiles" in (join_refusal((operand(n=100), operand()), interleave=False) or "")
    assert join_refusal((operand(), operand(n=100)), interleave=False) is None


def test_a_refused_model_is_unchanged() -> None:
    model = Attention(linear(128, 64), linear(128, 64, group_size=64))
    before = list(model.children())
    assert join_modules(model, ("q", "k"), interleave=False) == "groups of 32 and groups of 64"
    assert list(model.children()) == before
    model.k = nn.Linear(64, 64)
    assert join_modules(model, ("q", "k"), interleave=False) == "k is no packed linear"
