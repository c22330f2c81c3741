"""Experts' linears as one operand: the same results as one after the other, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from marlinq.kernels.contract.weight_formats import E2M1, INT4, INT8, WeightFormat
from marlinq.kernels.experts import ExpertWeights
from marlinq.runtime.grouped_experts import (
    GroupedExperts,
    activation_name,
    gated_name,
    group_experts,
    grouping_refusal,
    shared_as_experts,
)
from marlinq.runtime.quant_linear import QuantLinear
from tests.kernels.problems import random_operands, relative_error


def linear(
    k: int,
    n: int,
    group: int,
    zeros: bool,
    bias: bool = False,
    weight_format: WeightFormat = INT4,
    **more: object,
) -> QuantLinear:
    made = random_operands(
        k, n, group, torch.float16, zeros=zeros, bias=bias, device="cpu", weight_format=weight_format
    )
    given = {"order": None, "in_features": k, "out_features": n} | more
    operand = replace(made.operand, **given)  # type: ignore[arg-type]
    return QuantLinear(operand, made.bias)


def experts(
    count: int,
    hidden: int,
    inner: int,
    group: int,
    zeros: bool,
    bias: bool = False,
    weight_format: WeightFormat = INT4,
) -> list[list[QuantLinear]]:
    shapes = ((hidden, inner), (hidden, inner), (inner, hidden))
    return [[linear(k, n, group, zeros, bias, weight_format) for _ in range(count)] for k, n in shapes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (64, False), (-1, True)])
def test_grouped_experts_compute_what_single_ones_do(group: int, zeros: bool, bias: bool) -> None:
    torch.manual_seed(0)
    gate, up, down = experts(5, 128, 64, group, zeros, bias)
    if bias:
        # Some writers leave a bias of zeros out.
        down[2] = linear(64, 128, group, zeros)
    assert grouping_refusal(gate, up, down) is None
    module = GroupedExperts(group_experts(gate, up, down), "silu")
    assert "experts=5, hidden=128, intermediate=64" in repr(module)
    x = torch.randn(7, 128).half()
    weights, index = torch.softmax(torch.randn(7, 5), 1).topk(2, 1)
    index[3, 1] = 5  # nobody's
    found = module(x, index, weights.half())
    expected = torch.zeros(7, 128, dtype=torch.float64)
    for token in range(7):
        for slot in range(2):
            expert = int(index[token, slot])
            if expert == 5:
                continue
            inner = nn.functional.silu(gate[expert](x[token])) * up[expert](x[token])
            expected[token] += weights[token, slot].half().double() * down[expert](inner).double()
    # Five roundings to 11 bits in what is expected, one in what is found.
    assert relative_error(found, expected) < 6 * 2.0**-11


def experts_sum(layer: ExpertWeights, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """The results of all experts for every row, added."""
    count = len(layer.down.words)
    ids = torch.arange(count).expand(len(x), count).contiguous()
    return GroupedExperts(layer, activation)(x, ids, torch.ones(ids.shape))


@pytest.mark.parametrize(("count", "group", "bias"), [(1, 32, False), (2, 64, True), (3, -1, False)])
def test_a_shared_expert_as_experts_computes_what_it_does(count: int, group: int, bias: bool) -> None:
    torch.manual_seed(1)
    routed = group_experts(*experts(4, 128, 128, group, True, bias))
    gate, up, down = (found[0] for found in experts(1, 128, count * 128, group, True, bias))
    found = shared_as_experts(routed, gate, up, down)
    assert not isinstance(found, str), found
    assert len(found.down.words) == count
    x = torch.randn(5, 128).half()
    expected = down(nn.functional.silu(gate(x)) * up(x))
    assert relative_error(experts_sum(found, x), expected) < 6 * 2.0**-11
    module = GroupedExperts(routed, "silu")
    assert module.shared is None
    module.add_shared(found)
    assert module.bfloat16().shared is not None
    assert module.shared.down.scales.dtype == torch.bfloat16
    assert len(module.weights.down.words) == 4


@pytest.mark.parametrize(
    ("inner", "changes", "reason"),
    [
        (192, {}, "192 channels in 6 groups are not those of whole experts"),
        (128, {"group": 64}, "its format or groups are not the experts'"),
        (128, {"zeros": False}, "its sizes, zero points or biases are not the experts'"),
        (128, {"bias": True}, "its sizes, zero points or biases are not the experts'"),
    ],
)
def test_a_shared_expert_of_another_kind_stays_apart(
    inner: int, changes: dict[str, Any], reason: str
) -> None:
    kind: dict[str, Any] = {"group": 32, "zeros": True}
    routed = group_experts(*experts(3, 128, 128, **kind))
    shared = (found[0] for found in experts(1, 128, inner, **(kind | changes)))
    assert shared_as_experts(routed, *shared) == reason


def test_a_dense_shared_expert_stays_apart() -> None:
    routed = group_experts(*experts(3, 128, 64, 32, True))
    linears = nn.Linear(128, 64), nn.Linear(128, 64), nn.Linear(64, 128)
    assert shared_as_experts(routed, *linears) == "it is not packed"


def test_experts_without_a_gate_have_one_matrix_twice() -> None:
    torch.manual_seed(0)
    _, up, down = experts(3, 128, 64, 64, False)
    assert gated_name(ACT2FN["relu2"]) == "relu"
    assert gated_name(ACT2FN["silu"]) is None
    module = GroupedExperts(group_experts(up, up, down), "relu")
    x, index = torch.randn(5, 128).half(), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]])
    weights = torch.rand(5, 2).half()
    found = module(x, index, weights)
    expected = torch.zeros(5, 128, dtype=torch.float64)
    for token in range(5):
        for slot in range(2):
            expert = int(index[token, slot])
            inner = up[expert](x[token]).relu().square()
            expected[token] += weights[token, slot].double() * down[expert](inner).double()
    # As above.
    assert relative_error(found, expected) < 6 * 2.0**-11


def test_scales_of_another_dtype_keep_their_power_of_two() -> None:
    torch.manual_seed(0)
    module = GroupedExperts(group_experts(*experts(3, 64, 64, 32, False, weight_format=E2M1)), "silu")
    given = torch.randn(4, 64), torch.randint(0, 3, (4, 2)), torch.rand(4, 2)
    before = module(given[0].half(), *given[1:])
    after = module.to(torch.bfloat16)(given[0].bfloat16(), *given[1:])
    # Scales, activations and the result are rounded to 8 bits.
    assert relative_error(after, before.double()) < 5 * 2.0**-8
    assert relative_error(module.to(torch.float16)(given[0].half(), *given[1:]), after.double()) < 5 * 2.0**-8


def test_experts_that_can_not_be_grouped_say_why() -> None:
    gate, up, down = experts(2, 128, 64, 64, False)
    cases = [
        (([], [], []), "0 gates"),
        (([nn.Linear(128, 64), gate[1]], up, down), "an expert is multiplied by Linear"),
        (([linear(128, 64, 64, True), gate[1]], up, down), "the experts' gate differ"),
        ((gate, experts(2, 128, 128, 64, False)[0], down), r"gate is \(128, 64\) and up \(128, 128\)"),
        ((gate, up, experts(2, 128, 128, 64, False)[2]), r"gate is \(128, 64\) and down \(128, 128\)"),
        ((gate, up, experts(2, 128, 64, 32, False)[2]), "differ in format, groups or zero points"),
        (
            (gate, up, experts(2, 128, 64, 64, False, weight_format=INT8)[2]),
            "differ in format, groups or zero points",
        ),
        (([linear(128, 64, 64, False, in_features=100)] * 2, up, down), "a hidden size of 100"),
        (
            ([linear(128, 64, 64, False, order=torch.arange(128, dtype=torch.int32))] * 2, up, down),
            "an activation order",
        ),
    ]
    for given, words in cases:
        reason = grouping_refusal(*given)  # type: ignore[arg-type]
        assert reason is not None
        assert re.search(words, reason), reason


def test_activations_are_told_apart_by_what_they_compute() -> None:
    def gated(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def gate(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return ACT2FN[name](first) * second  # type: ignore[no-any-return]

        return gate

    known = {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu2",
    }
    for theirs, ours in known.items():
        assert activation_name(gated(theirs)) == ours
    assert activation_name(gated("quick_gelu")) is None

    def clamped(x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        first, second = first.clamp(max=limit), second.clamp(-limit, limit)
        return (second + 1) * first * torch.sigmoid(alpha * first)

    assert activation_name(clamped) == "clamped_swiglu"
    assert activation_name(lambda x: clamped(x, limit=6.0)) is None
    assert activation_name(lambda x: clamped(x, alpha=1.5)) is None
    # Exchanged halves, and a limit of both.
    assert activation_name(lambda x: gated("silu")(torch.cat(x.chunk(2, -1)[::-1], -1))) is None
    assert activation_name(lambda x: gated("silu")(x.clamp(max=7.0))) is None
