"""FP8 activations: the operator's reference, and when they are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marlinq.core.float_elements import E4M3 as ELEMENT
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations
from marlinq.kernels.choose.eight_bit_decision import decide_eight_bits
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import E4M3, INT8
from marlinq.kernels.ops.fp8_a8 import fp8_a8_gemm
from tests.emulation.gemm import AMPERE, H200
from tests.kernels.problems import random_operands, relative_error

DYNAMIC = Activations(ELEMENT, Granularity.channel(), dynamic=True)
STATIC = Activations(ELEMENT, Granularity.tensor(), dynamic=False)
BLOCKS = Activations(ELEMENT, Granularity.group(128), dynamic=True)
GATE_UP = Problem(1, 28672, 4096, Granularity.channel(), False, True, E4M3)


@pytest.mark.parametrize(("group", "static"), [(-1, False), (-1, True), (128, False)])
def test_the_operator_rounds_activations_to_e4m3(group: int, static: bool) -> None:
    torch.manual_seed(0)
    made = random_operands(256, 128, group, torch.bfloat16, bias=True, device="cpu", weight_format=E4M3)
    x = torch.randn(2, 3, 256).bfloat16()
    scale = torch.tensor(4.5 / 448) if static else None
    given = x, made.words, made.scales, made.bias, scale, group, 128
    found = fp8_a8_gemm(*given)
    exact = made.reference(x.view(6, 256)).view(2, 3, 128)
    error = relative_error(found, exact)
    # E4M3 has three bits behind the first: a rounding of at most 2^-4, 2^-4 / sqrt(3) / 1.44 in the mean.
    assert 2.0**-7 < error < 2.0**-4
    assert found.shape == (2, 3, 128)
    torch.library.opcheck(
        torch.ops.marlinq.fp8_a8_gemm.default, given, test_utils=("test_schema", "test_faketensor")
    )


def test_activations_that_e4m3_holds_are_not_rounded() -> None:
    torch.manual_seed(0)
    made = random_operands(128, 64, -1, torch.bfloat16, device="cpu", weight_format=E4M3)
    x = torch.randint(-8, 9, (5, 128)).bfloat16()
    x[:, 0] = 7 * 2.0**6  # the largest of E4M3, so that scales are 1
    found = fp8_a8_gemm(x, made.words, made.scales, None, None, -1, 64)
    assert relative_error(found, made.reference(x)) < 2.0**-8


def test_operands_that_do_not_fit_are_named() -> None:
    made = random_operands(128, 64, 64, torch.bfloat16, device="cpu", weight_format=E4M3)
    x = torch.randn(2, 128).bfloat16()
    with pytest.raises(ValueError, match="group_size: expected -1, or 128"):
        fp8_a8_gemm(x, made.words, made.scales, None, None, 64, 64)
    with pytest.raises(ValueError, match="scales: expected"):
        fp8_a8_gemm(x, made.words, made.scales, None, None, -1, 64)
    with pytest.raises(ValueError, match="x: expected 128 columns"):
        fp8_a8_gemm(x[:, :64], made.words, made.scales, None, None, -1, 64)


def test_many_rows_take_fp8_activations_and_few_do_not() -> None:
    for problem, activations in (
        (GATE_UP, DYNAMIC),
        (GATE_UP, STATIC),
        (replace(GATE_UP, granularity=Granularity.group(128)), BLOCKS),
    ):
        found = decide_eight_bits(problem, activations, H200)
        assert found.least_rows is not None
        assert 512 <= found.least_rows <= 4096
        assert f"from {found.least_rows} rows on" in found.reason


# (layer, N, K, channels of a group or -1): us of FP8 and of 16-bit activations by rows, measured on an H200.
MEASURED = {
    ("qkv", 6144, 4096, -1): {512: (52.1, 35.4), 1024: (69.2, 67.2), 2048: (108.6, 133.9)},
    ("o", 4096, 4096, -1): {512: (35.6, 25.1), 1024: (49.6, 45.2), 2048: (80.6, 106.2)},
    ("gate_up", 28672, 4096, -1): {256: (131.3, 87.7), 512: (167.4, 167.8), 1024: (252.5, 315.8)},
    ("down", 4096, 14336, -1): {512: (89.1, 79.4), 1024: (133.4, 150.7), 2048: (229.4, 363.9)},
    ("qkv", 6144, 4096, 128): {1024: (83.6, 68.2), 2048: (137.3, 135.9), 4096: (242.2, 283.7)},
    ("o", 4096, 4096, 128): {1024: (59.7, 45.7), 2048: (99.5, 106.6), 4096: (172.5, 208.8)},
    ("gate_up", 28672, 4096, 128): {512: (202.0, 171.4), 1024: (318.2, 323.6), 2048: (551.8, 649.8)},
}


@pytest.mark.parametrize("layer", MEASURED, ids=str)
def test_the_decision_never_takes_what_was_measured_slower(layer: tuple[str, int, int, int]) -> None:
    _, n, k, group = layer
    problem = Problem(1, n, k, Granularity.from_group_size(group), False, True, E4M3)
    found = decide_eight_bits(problem, DYNAMIC if group < 0 else BLOCKS, H200)
    assert found.least_rows is not None
    for rows, (eight, sixteen) in MEASURED[layer].items():
        if rows >= found.least_rows:
            assert eight < sixteen


def test_reasons_say_why_activations_stay_in_16_bits() -> None:
    hopper, before_ada = H200, AMPERE
    ada = replace(AMPERE, architecture="sm_89")
    group = replace(GATE_UP, granularity=Granularity.group(128))
    for problem, activations, device, words in (
        (GATE_UP, None, hopper, "the checkpoint wants 16-bit activations"),
        (GATE_UP, DYNAMIC, before_ada, "sm_86 has no FP8 products"),
        (replace(GATE_UP, bfloat16=False), DYNAMIC, hopper, "activations in float16"),
        (replace(GATE_UP, format=INT8), DYNAMIC, hopper, "int8 weights"),
        (group, DYNAMIC, hopper, "groups of 128 with dynamic fp8_e4m3 activations, one scale per token"),
        (group, BLOCKS, ada, "no product of scales by group for sm_89"),
        (GATE_UP, BLOCKS, hopper, "one scale per channel with dynamic"),
        (replace(GATE_UP, n=64, k=64), DYNAMIC, hopper, "not expected to be faster"),
    ):
        found = decide_eight_bits(problem, activations, device)
        assert found.least_rows is None
        assert words in found.reason
