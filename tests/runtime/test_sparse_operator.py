"""A linear of a sparse layout is multiplied by the sparse operator where that is faster or asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.formats import LAYOUTS, StoredWeight, spec_of
from marlinq.kernels import Device, KernelDecision, Problem
from marlinq.kernels.contract.weight_formats import INT4_SPARSE
from marlinq.runtime import OPERATORS, QuantLinear, Setting, decide
from marlinq.runtime.operators import dense, operator, packed
from tests.kernels.sparse_problems import random_sparse

CPU = Setting(torch.device("cpu"), torch.float32)


def stored(layout: str) -> StoredWeight:
    """A random sparse weight as a checkpoint in ``layout`` holds it."""
    weight, packer = random_sparse(128, 64, 64), LAYOUTS[layout]
    scheme = replace(spec_of(weight).scheme, sparsity=packer.sparsity)
    return StoredWeight("linear", packer, replace(spec_of(weight), scheme=scheme), packer.pack(weight))


@pytest.mark.parametrize("layout", ["marlin-24", "gptq-marlin-24"])
def test_the_operator_multiplies_where_it_is_asked_for(layout: str) -> None:
    weight = stored(layout)
    assert weight.scheme.sparsity == TWO_OF_FOUR
    decision = decide(weight, CPU, operator="sparse-w4a16")
    assert decision.operator == "sparse-w4a16"
    bias = torch.randn(64)
    module = OPERATORS[decision.operator].build(weight, bias, CPU)
    assert isinstance(module, QuantLinear)
    assert module.format is INT4_SPARSE
    x = torch.randn(2, 3, 128)
    expected = x.double() @ weight.weight().dequantize(torch.float64).t() + bias.double()
    # Sums of 128 products in float32.
    torch.testing.assert_close(module(x).double(), expected, rtol=0, atol=128 * 2**-24 * 16)


def test_a_gpu_takes_the_faster_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(device: torch.device, problem: Problem) -> KernelDecision:
        return KernelDecision("bulk", "tile 8x64", seconds=seconds[problem.format.name])

    seconds = {"int4": 4e-6, "int4-2:4": 3e-6}
    monkeypatch.setattr(operator, "find_spec", lambda name: object())
    monkeypatch.setattr(packed, "explain", explain)
    monkeypatch.setattr(dense, "device_numbers", lambda index: Device("sm_90a", 132, 232448, bandwidth=4e12))
    gpu = Setting(torch.device("cuda:0"), torch.float16)
    assert decide(stored("marlin-24"), gpu).operator == "sparse-w4a16"
    assert decide(stored("gptq"), gpu).operator != "sparse-w4a16"
    seconds["int4-2:4"] = 5e-6
    assert decide(stored("marlin-24"), gpu).operator != "sparse-w4a16"


def test_dense_layouts_are_not_known_to_be_sparse() -> None:
    reason = OPERATORS["sparse-w4a16"].refusal(stored("gptq"), CPU) or ""
    assert "convert --to marlin-24" in reason
