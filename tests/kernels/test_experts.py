"""Experts on the CPU: the layout of gate and up, the operator and its checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8, WeightFormat
from marlinq.kernels.experts import ACTIVATIONS, ExpertWeights, routed_experts
from marlinq.kernels.experts.experts_reference import expert_matrix
from tests.kernels.experts_problems import Shape, random_layer, random_routing
from tests.kernels.problems import BOUND, relative_error

# (weight format, group size, whether zero points are stored)
KINDS = (
    (INT4, 32, True),
    (INT4, 64, False),
    (INT4, 128, True),
    (INT4, -1, False),
    (INT8, 64, True),
    (INT8, -1, False),
    (E4M3, 128, False),
    (E2M1, 16, False),
)


@pytest.mark.parametrize(("weight_format", "group", "zeros"), KINDS)
def test_gate_and_up_take_turns_in_blocks_of_16_columns(
    weight_format: WeightFormat, group: int, zeros: bool
) -> None:
    layer = random_layer(Shape(3, 2, 256, 192 if group < 128 else 256, group, zeros, format=weight_format))
    for expert in range(3):
        both = expert_matrix(layer.weights.gate_up, expert).unflatten(1, (-1, 2, 16))
        assert torch.equal(both[:, :, 0].flatten(1), layer.gate[expert].float())
        assert torch.equal(both[:, :, 1].flatten(1), layer.up[expert].float())
        assert torch.equal(expert_matrix(layer.weights.down, expert), layer.down[expert].float())


@pytest.mark.parametrize(("weight_format", "group", "zeros"), KINDS[4:])
def test_every_format_on_the_cpu(weight_format: WeightFormat, group: int, zeros: bool) -> None:
    torch.manual_seed(0)
    shape = Shape(4, 2, 128, 128, group, zeros, torch.bfloat16, format=weight_format)
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 5)
    found = routed_experts(x, ids, weights, layer.weights)
    assert relative_error(found, layer.reference(x, ids, weights)) < BOUND[shape.dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_operator_on_the_cpu(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = Shape(6, 3, 128, 64, 32, True, dtype, biased=activation == "clamped_swiglu")
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 9)
    found = routed_experts(x, ids, weights, layer.weights, activation)
    assert relative_error(found, layer.reference(x, ids, weights, activation)) < BOUND[dtype]


def test_experts_that_are_elsewhere_are_left_out() -> None:
    shape = Shape(4, 2, 64, 64, 64)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=8), 12)
    ids[0] = torch.tensor([-1, 99], dtype=torch.int32)
    expert_map = torch.tensor([-1, 2, -1, 0, 3, -1, 1, -1], dtype=torch.int32)
    found = routed_experts(x, ids, weights, layer.weights, expert_map=expert_map)
    expected = layer.reference(x, ids, weights, expert_map=expert_map)
    assert not found[0].any()
    assert relative_error(found, expected) < BOUND[shape.dtype]


def test_operands_that_do_not_fit_are_named() -> None:
    shape = Shape(4, 2, 64, 64, 64)
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 3)
    down = layer.weights.down
    biased = replace(down, bias=torch.zeros(4, 64).half())

    def of_kind(**kind: object) -> ExpertWeights:
        return ExpertWeights(*(replace(stored, **kind) for stored in layer.weights))  # type: ignore[arg-type]

    for given, words in (
        ((x[:, :32], ids, weights, layer.weights), "x: expected"),
        ((x, ids.short(), weights, layer.weights), "ids: expected"),
        ((x, ids, weights.half(), layer.weights), "weights: expected"),
        ((x.bfloat16(), ids, weights, layer.weights), "gate_up scales: expected"),
        ((x, ids, weights, layer.weights._replace(down=layer.weights.gate_up)), "down: expected"),
        (
            (x, ids, weights, layer.weights._replace(down=replace(down, format=E2M1))),
            "gate_up and down: expected one weight format",
        ),
        (
            (x, ids, weights, of_kind(granularity=Granularity.group(48))),
            "no kernel multiplies int4 with groups of 48",
        ),
        (
            (x, ids, weights, of_kind(granularity=Granularity.group(16))),
            "no kernel multiplies int4 with groups of 16",
        ),
        ((x, ids, weights, of_kind(format=E2M1, zeros=down.scales)), "zeros: fp4_e2m1 weights have none"),
        ((x, ids, weights, layer.weights._replace(down=biased)), "bias: expected biases of gate_up and down"),
        ((x, ids, weights, layer.weights._replace(down=replace(biased, bias=x))), "down bias: expected"),
    ):
        with pytest.raises(ValueError, match=words):
            routed_experts(*given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation 'tanh': expected"):
        routed_experts(x, ids, weights, layer.weights, "tanh")


@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_passes_torchs_own_checks(biased: bool) -> None:
    shape = Shape(4, 2, 64, 64, 64, biased=biased)
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 3)
    gate_up, down = layer.weights
    operands = gate_up.words, gate_up.scales, gate_up.zeros, down.words, down.scales, down.zeros
    given = (x, ids, weights, *operands, "int4", 64, "silu", None, gate_up.bias, down.bias)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.marlinq.routed_experts.default, given, test_utils=tests)
