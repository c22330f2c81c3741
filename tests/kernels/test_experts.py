"""Experts on the CPU: the layout of gate and up, the operator and its checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.experts import ACTIVATIONS, w4a16_experts
from marlinq.kernels.experts.reference import expert_matrix
from tests.kernels.experts_problems import Shape, random_layer, random_routing
from tests.kernels.problems import BOUND, relative_error


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("zeros", [False, True])
def test_gate_and_up_take_turns_in_blocks_of_16_columns(group: int, zeros: bool) -> None:
    layer = random_layer(Shape(3, 2, 256, 192, group, zeros))
    for expert in range(3):
        both = expert_matrix(layer.weights.gate_up, expert, INT4).unflatten(1, (-1, 2, 16))
        assert torch.equal(both[:, :, 0].flatten(1), layer.gate[expert].float())
        assert torch.equal(both[:, :, 1].flatten(1), layer.up[expert].float())
        assert torch.equal(expert_matrix(layer.weights.down, expert, INT4), layer.down[expert].float())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_operator_on_the_cpu(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = Shape(6, 3, 128, 64, 32, True, dtype, biased=activation == "clamped_swiglu")
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 9)
    found = w4a16_experts(x, ids, weights, layer.weights, activation)
    assert relative_error(found, layer.reference(x, ids, weights, activation)) < BOUND[dtype]


def test_experts_that_are_elsewhere_are_left_out() -> None:
    shape = Shape(4, 2, 64, 64, 64)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=8), 12)
    ids[0] = torch.tensor([-1, 99], dtype=torch.int32)
    expert_map = torch.tensor([-1, 2, -1, 0, 3, -1, 1, -1], dtype=torch.int32)
    found = w4a16_experts(x, ids, weights, layer.weights, expert_map=expert_map)
    expected = layer.reference(x, ids, weights, expert_map=expert_map)
    assert not found[0].any()
    assert relative_error(found, expected) < BOUND[shape.dtype]


def test_what_does_not_fit_is_named() -> None:
    shape = Shape(4, 2, 64, 64, 64)
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 3)
    biased = layer.weights.down._replace(bias=torch.zeros(4, 64).half())
    for given, words in (
        ((x[:, :32], ids, weights, layer.weights), "x: expected"),
        ((x, ids.short(), weights, layer.weights), "ids: expected"),
        ((x, ids, weights.half(), layer.weights), "weights: expected"),
        ((x.bfloat16(), ids, weights, layer.weights), "gate_up scales: expected"),
        ((x, ids, weights, layer.weights._replace(down=layer.weights.gate_up)), "down: expected"),
        (
            (x, ids, weights, layer.weights._replace(granularity=Granularity.group(48))),
            "group_size: expected",
        ),
        ((x, ids, weights, layer.weights._replace(down=biased)), "bias: expected biases of gate_up and down"),
        (
            (x, ids, weights, layer.weights._replace(down=biased._replace(bias=x))),
            "down bias: expected",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            w4a16_experts(*given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation 'tanh': expected"):
        w4a16_experts(x, ids, weights, layer.weights, "tanh")


@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_passes_torchs_own_checks(biased: bool) -> None:
    shape = Shape(4, 2, 64, 64, 64, biased=biased)
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 3)
    gate_up, down = layer.weights.gate_up, layer.weights.down
    given = (x, ids, weights, *gate_up[:3], *down[:3], 64, "silu", None, gate_up.bias, down.bias)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.marlinq.w4a16_experts.default, given, test_utils=tests)
