"""Where the activation is in the epilogue of the product of gate and up, and where it is a kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from marlinq.core.granularity import Granularity
from marlinq.kernels import Operand, decide, dependent_launches
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.models.anatomy import Slices
from marlinq.runtime import QuantLinear
from marlinq.runtime.step import products
from marlinq.runtime.step.products import Product, find_product


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "device_numbers", lambda index: H200)


def gate_up(inner: int, hidden: int, *, interleave: bool = True, group: int = 128) -> Product:
    """The product of an MLP whose weights nobody reads."""
    model = nn.Module()
    for name in ("gate", "up"):
        words = torch.empty((hidden // 16, 2 * inner), dtype=torch.int32)
        scales = torch.empty((hidden // group, inner), dtype=torch.float16)
        setattr(model, name, QuantLinear(Operand.whole(INT4, Granularity.group(group), words, scales, None)))
    slices = Slices(("gate", "up"), (inner, inner))
    product, reason = find_product(model, slices, interleave=interleave)
    assert reason is None
    return product


@pytest.mark.parametrize("rows", [1, 4, 16, 32, 64])
def test_pairs_of_tiles_activate_in_the_epilogue(rows: int) -> None:
    product = gate_up(1792, 512)
    with dependent_launches():
        problem = product.activated_problem(rows, "silu", 0)
        assert problem is not None
        config = decide(problem, H200).config
    assert config is not None
    assert config.tile_n % 128 == 0
    assert config.activates(problem)
    assert (problem.m, problem.n, problem.k, problem.activation) == (rows, 3584, 512, "silu")


def test_an_epilogue_that_costs_more_than_a_kernel_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    product = gate_up(1536, 512)
    assert product.activated_problem(4, "gelu_tanh", 0) is not None
    monkeypatch.setattr(products, "_ACTIVATION_SECONDS", -1.0)
    assert product.activated_problem(4, "gelu_tanh", 0) is None


def test_parts_side_by_side_have_a_kernel() -> None:
    product = gate_up(256, 256, interleave=False)
    assert product.activated_problem(4, "silu", 0) is None
