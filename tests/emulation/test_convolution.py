"""A token of a short convolution between gates on the emulation."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, Memory, apart
from marlinq.kernels.step import ConvolutionWeights, gated_convolution
from tests.emulation.step import DTYPES, constants, given, poisoned, results, start, strided
from tests.kernels.step_problems import BOUND, expected_convolution, random, relative_error
from tests.testing.pairs import in_turn


class Case(NamedTuple):
    """Sizes of a convolution, and the lengths of its rows."""

    channels: int
    taps: int
    gate: int
    bias: bool
    lengths: tuple[int, ...]


# The second has two blocks a row, the second of them with threads to spare.
CASES = [Case(64, 3, 1, False, (0, 5, 2)), Case(320, 4, 0, True, (3, 1)), Case(24, 1, 2, True, (7,))]


def convolution(case: Case, dtype: torch.dtype) -> tuple[ConvolutionWeights, dict[str, Tensor]]:
    batch, channels = len(case.lengths), case.channels
    bias = apart(torch.randn(channels)) if case.bias else None
    weights = ConvolutionWeights(apart(torch.randn(channels, case.taps)), bias, case.gate)
    tensors = {
        "x": strided(batch, 3 * channels, 3 * channels + 8, dtype),
        "out": poisoned(batch, channels, dtype=dtype),
        "ring": apart(random(batch, case.taps, channels, dtype=dtype)),
        "lengths": apart(torch.tensor(case.lengths, dtype=torch.int32)),
    }
    return weights, tensors


def memory(weights: ConvolutionWeights, tensors: dict[str, Tensor]) -> list[Memory]:
    return [
        *given(x=tensors["x"]),
        *constants(lengths=tensors["lengths"], weight=weights.weight, bias=weights.bias),
        Memory("ring", tensors["ring"], writable=True, holds_values=True),
        *results(out=tensors["out"]),
    ]


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, DTYPES), ids=str)
def test_convolution(builder: Builder, case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(case.channels)
    weights, tensors = convolution(case, dtype)
    ring = tensors["ring"].clone()
    order = ("x", "out", "ring", "lengths")
    prepared = gated_convolution(*(tensors[name] for name in order), weights)
    start(builder, prepared, memory(weights, tensors), seed=case.channels)
    out, kept = expected_convolution(tensors["x"], ring, tensors["lengths"], weights)
    assert relative_error(tensors["out"], out) < BOUND[dtype]
    assert torch.equal(tensors["ring"], kept)


FAULTS = [Planted("convolution_waits"), Planted("convolution_place", "(position + 1) % TAPS")]


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.site)
def test_a_planted_fault_is_found(builder: Builder, planted: Planted) -> None:
    torch.manual_seed(0)
    weights, tensors = convolution(CASES[0], torch.float16)
    ring = tensors["ring"].clone()
    prepared = gated_convolution(*(tensors[name] for name in ("x", "out", "ring", "lengths")), weights)
    if planted.site == "convolution_waits":
        with pytest.raises(KernelFault, match=r"griddepcontrol\.wait"):
            start(builder, prepared, memory(weights, tensors), planted=planted)
        return
    start(builder, prepared, memory(weights, tensors), planted=planted)
    _, kept = expected_convolution(tensors["x"], ring, tensors["lengths"], weights)
    assert not torch.equal(tensors["ring"], kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": (3, 56)}, "x, out: "),
        ({"x": (3, 64)}, "x, out: "),
        ({"ring": (3, 4, 64)}, "ring: expected"),
    ],
)
def test_other_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    weights, tensors = convolution(CASES[0], torch.float16)
    tensors |= {name: torch.zeros(shape, dtype=tensors[name].dtype) for name, shape in changes.items()}
    with pytest.raises(ValueError, match=message):
        gated_convolution(*(tensors[name] for name in ("x", "out", "ring", "lengths")), weights)
