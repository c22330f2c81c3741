"""Vectors of layers from a token's projected embedding on the emulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, Memory, apart
from marlinq.kernels.step import LayerInputWeights, RowNorm, layer_inputs
from tests.emulation.step import (
    DTYPES,
    constants,
    given,
    poisoned,
    results,
    row_norm,
    start,
    strided,
    weights_of,
)
from tests.kernels.step_problems import BOUND, expected_layer_inputs, random, relative_error
from tests.testing.pairs import in_turn

ROWS, VOCABULARY = 3, 7
# (P, layers, kind of the norm, whether it has a weight)
CASES = [(256, 3, "RMS_WIDE", True), (8, 5, "RMS", True), (72, 1, "RMS_WIDE", False)]


def inputs(
    case: tuple[int, int, str, bool], dtype: torch.dtype
) -> tuple[LayerInputWeights, dict[str, Tensor], list[Memory]]:
    width, layers, kind, weighted = case
    torch.manual_seed(width)
    norm = row_norm(kind, width, dtype) if weighted else RowNorm("RMS_WIDE", None, None, 0.25)
    table = apart(random(VOCABULARY, layers * width, dtype=dtype))
    weights = LayerInputWeights(table, 4.0, norm, width, 0.75)
    tensors = {
        "tokens": apart(torch.randint(0, VOCABULARY, (ROWS,))),
        "x": strided(ROWS, layers * width, layers * width + 16, dtype),
        "out": poisoned(ROWS, layers * width, dtype=dtype),
    }
    memory = [
        *constants(tokens=tensors["tokens"], table=table),
        *weights_of("norm's", norm),
        *given(x=tensors["x"]),
        *results(out=tensors["out"]),
    ]
    return weights, tensors, memory


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, DTYPES), ids=str)
def test_layer_inputs(builder: Builder, case: tuple[int, int, str, bool], dtype: torch.dtype) -> None:
    weights, tensors, memory = inputs(case, dtype)
    start(builder, layer_inputs(*tensors.values(), weights), memory)
    expected = expected_layer_inputs(tensors["tokens"], tensors["x"], weights)
    assert relative_error(tensors["out"], expected) < BOUND[dtype]


FAULTS = [Planted("layer_inputs_wait")]


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.site)
def test_a_planted_fault_is_reported(builder: Builder, planted: Planted) -> None:
    weights, tensors, memory = inputs(CASES[1], torch.float16)
    with pytest.raises(KernelFault, match=r"griddepcontrol\.wait"):
        start(builder, layer_inputs(*tensors.values(), weights), memory, planted=planted)


def test_other_shapes_are_refused() -> None:
    weights, tensors, _ = inputs(CASES[1], torch.float16)
    with pytest.raises(ValueError, match="x, tokens: "):
        layer_inputs(tensors["tokens"][:2], tensors["x"], tensors["out"], weights)
    with pytest.raises(ValueError, match="table: expected rows of 24"):
        layer_inputs(tensors["tokens"], tensors["x"], tensors["out"][:, :24].contiguous(), weights)
