from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marlinq.core.scheme import INT8
from marlinq.methods import outputs
from marlinq.methods.gptq import GPTQ, GPTQOptions, solve_gptq_shared
from marlinq.methods.hessian import HessianAccumulator
from marlinq.methods.outputs import parts, solve_in_parts
from marlinq.methods.solution import Solution
from tests.testing.layers import make_layer
from tests.testing.schemes import scheme

Gradients = tuple[HessianAccumulator, Tensor]


def gradients(n: int, seed: int = 0, common: float = 1.0) -> Gradients:
    """Gradients of N correlated outputs, with their second moment as the solve takes it, float64."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(n) + common * torch.randn(n, n, generator=generator) / n**0.5
    rows = torch.randn(8 * n, n, generator=generator) @ mixing
    gathered = HessianAccumulator(n, device=torch.device("cpu"), name="outputs")
    gathered.add(rows)
    whole = 2 * (rows.t() @ rows).double() / len(rows)
    moment = torch.where(torch.eye(n) > 0, whole, (1 - outputs._SHRINKAGE) * whole)
    moment += outputs._DAMP * whole.diagonal().mean() * torch.eye(n, dtype=torch.float64)
    return gathered, moment


def loss(weight: Tensor, quantized: Tensor, hessian: Tensor, moment: Tensor) -> float:
    """tr(F D H D^T) in float64."""
    d = (quantized - weight).double()
    return float((moment @ d @ hessian.double() * d).sum())


def to_tenths(w: Tensor) -> Solution:
    """Stands for a solve: columns rounded to tenths, as one group."""
    codes = (w * 10).round().clamp(-100, 100) + 100
    ones = torch.ones(1, w.shape[1])
    return Solution(codes.to(torch.uint8), ones / 10, ones * 100, torch.zeros(w.shape[1]).double(), INT8)


@pytest.mark.parametrize("widths", [(48,), (48, 20), (17, 5)])
def test_each_part_makes_up_for_those_before(widths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(6, sum(widths), generator=generator)
    count = parts(6)
    found = [gradients(width, seed) for seed, width in enumerate(widths)]
    gathered = [gathered for gathered, _ in found]
    solution, error, reasons = solve_in_parts(w, widths, gathered, 6, INT8, to_tenths)
    assert not any(reasons)
    # The rest of the weights moves by what solves F_rest D_rest = -F_rest,part D_part, part after part.
    for columns, (_, moment) in zip(torch.arange(sum(widths)).split(list(widths)), found, strict=True):
        left, rest = w[:, columns].t().double(), torch.arange(len(columns))
        for part in range(min(count, len(columns))):
            own = torch.arange(part, len(columns), count)
            expected = to_tenths(left[own].t().float()).dense(6).t().double()
            # A tie may fall the other way in float32; there is none among these numbers.
            assert torch.equal(solution.dense(6)[:, columns][:, own].t().double(), expected)
            rest = rest[~torch.isin(rest, own)]
            moved = torch.linalg.solve(moment[rest][:, rest], moment[rest][:, own] @ (expected - left[own]))
            left[rest] -= moved
    assert torch.equal(error, solution.dense(6) - w)


def test_wide_layers_have_fewer_parts() -> None:
    assert [parts(k) for k in (64, 576, 1536, 4096, 14336)] == [16, 16, 16, 6, 4]


@pytest.mark.parametrize(("group_size", "symmetric"), [(32, True), (64, False), (-1, True)])
def test_the_loss_of_all_outputs_together_is_lower(group_size: int, symmetric: bool) -> None:
    wanted = scheme(group_size, symmetric=symmetric)
    plain = minded = of_inputs = 0.0
    for seed in range(3):
        weight, hessian = make_layer(64, 128, seed)
        gathered, moment = gradients(64, seed)
        alone, before = solve_gptq_shared([weight], hessian, wanted)[0]
        together, after = solve_gptq_shared([weight], hessian, wanted, outputs=[gathered])[0]
        plain += loss(weight, alone.dequantize(), hessian, moment)
        minded += loss(weight, together.dequantize(), hessian, moment)
        of_inputs += after.relative_error / before.relative_error / 3
    assert minded < 0.9 * plain
    # The cost is larger where each output counts by itself.
    assert 1.05 < of_inputs < 1.5


def test_outputs_that_do_not_go_together_are_solved_as_ever() -> None:
    weight, hessian = make_layer(40, 64)
    gathered = HessianAccumulator(40, device=torch.device("cpu"), name="outputs")
    gathered.add(torch.diag(torch.linspace(1, 2, 40)))
    never = HessianAccumulator(40, device=torch.device("cpu"), name="outputs")
    expected = solve_gptq_shared([weight, weight], hessian, scheme(32))
    for given in ([gathered, None], [None, never], [gathered, never]):
        for (found, report), (whole, before) in zip(
            solve_gptq_shared([weight, weight], hessian, scheme(32), outputs=given), expected, strict=True
        ):
            assert torch.equal(found.codes, whole.codes)
            assert torch.equal(found.scales, whole.scales)
            assert report.relative_error == pytest.approx(before.relative_error, rel=1e-2)
    reports = [
        report for _, report in solve_gptq_shared([weight] * 2, hessian, scheme(32), outputs=[None, never])
    ]
    assert reports[0].fallback is None
    assert reports[1].fallback == "outputs taken for independent: the loss's gradients there are zero"


@pytest.mark.parametrize("act_order", ["none", "static"])
def test_the_reported_error_is_that_of_the_outputs(act_order: str) -> None:
    weight, hessian = make_layer(48, 128)
    quantized, report = solve_gptq_shared(
        [weight], hessian, scheme(32), GPTQOptions(act_order=act_order), outputs=[gradients(48)[0]]
    )[0]
    d, w, h = (weight - quantized.dequantize()).double(), weight.double(), hessian.double()
    expected = float(((d @ h) * d).sum() / ((w @ h) * w).sum())
    assert report.relative_error == pytest.approx(expected, rel=1e-4)
    assert report.fallback is None


def test_the_solve_finds_them_by_name() -> None:
    weight, _ = make_layer(48, 64)
    statistics = HessianAccumulator(64, device=torch.device("cpu"), name="inputs")
    statistics.add(torch.randn(400, 64, generator=torch.Generator().manual_seed(2)))
    statistics.outputs["up"] = gradients(48)[0]
    up, gate = (
        GPTQ().solve([weight], statistics, scheme(32), GPTQOptions(), names=[name])[0][0]
        for name in ("up", "gate")
    )
    assert not torch.equal(up.codes, gate.codes)
