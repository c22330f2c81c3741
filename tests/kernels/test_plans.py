"""Plans are found by their tensors, checked against them, and gone with them."""

from __future__ import annotations

import gc

import pytest
import torch

from marlinq.kernels import plans
from marlinq.kernels.operands import Operands
from tests.kernels.problems import random_operands


class _Call:
    """Counts its launches."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.started: list[tuple[int, int, int]] = []

    def start(self, x: int, x_stride: int, out: int) -> None:
        self.started.append((x, x_stride, out))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[_Call]:
    calls: list[_Call] = []

    def prepare(operands: Operands, group_size: int) -> _Call:
        assert group_size == 64
        calls.append(_Call(operands.x.shape[0]))
        return calls[-1]

    monkeypatch.setattr(plans, "prepare", prepare)
    # A tensor on the CPU says -1, its device None.
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: self.device.index)
    return calls


def test_a_plan_serves_every_shape_that_fits(prepared: list[_Call]) -> None:
    operands = random_operands(128, 192, 64, torch.float16, device="cpu")
    plan = plans.Plan((operands.words, operands.scales, None, None), 64, lambda _: None)
    given = operands.words, operands.scales, None, None
    for shape in ((5, 128), (1, 5, 128), (128,), (0, 128)):
        out = plan.run(torch.zeros(shape).half(), given)
        assert out is not None
        assert out.shape == (*shape[:-1], 192)
    assert [call.rows for call in prepared] == [5, 1]
    assert [len(call.started) for call in prepared] == [2, 1]
    assert all(stride == 128 for call in prepared for _, stride, _ in call.started)


def test_what_does_not_fit_goes_back_to_the_checks(prepared: list[_Call]) -> None:
    operands = random_operands(128, 192, 64, torch.float16, device="cpu")
    plan = plans.Plan((operands.words, operands.scales, None, None), 64, lambda _: None)
    given = operands.words, operands.scales, None, None
    wide = torch.zeros(4, 256).half()
    for x in (wide[:, :128], wide[:2], wide.flatten()[1:257].view(2, 128)):
        assert plan.run(x, given) is None
    moved = operands.scales.clone()
    assert plan.run(wide[:1, :128], (operands.words, moved, None, None)) is None
    assert not prepared


def test_a_plan_goes_with_its_tensors() -> None:
    operands = random_operands(128, 192, 64, torch.float16, device="cpu", zeros=True, bias=True)
    given = operands.words, operands.scales, operands.zeros, operands.bias
    key = plans.key_of(given, 64, 192, torch.float16)
    plans.remember(key, given, 64)
    assert plans.find(key) is not None
    operands.zeros = None
    del given
    gc.collect()
    assert plans.find(key) is None
