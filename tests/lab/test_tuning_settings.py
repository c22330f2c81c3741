"""Differences between tries of tuning: rows, steps of codes, and how long these last."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.quality.tuning_settings import Tilted, freeze_codes, kept_divergences, last_tenth
from marlinq.operations.quantize.tuning import loop


def optimiser(slow: torch.Tensor, codes: torch.Tensor) -> torch.optim.Adam:
    groups: list[dict[str, Any]] = [{"params": [leaf], "lr": 0.1, "highest": 0.1} for leaf in (slow, codes)]
    return torch.optim.Adam(groups, foreach=True)


@pytest.mark.parametrize("tilt", [0.0, 1.0, -1.0])
def test_tilted_steps_are_adams_times_a_factor(tilt: float) -> None:
    start = torch.zeros(3)
    plain = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    tilted = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    adam, other = optimiser(*plain), Tilted(optimiser(*tilted), tilt)
    # Gradients of one size each: their RMS is 1, 2 and 100, with a geometric mean of 5.848.
    sizes = torch.tensor([1.0, 2.0, 100.0])
    for sign in (1, -1, 1, 1):
        for leaf in (*plain, *tilted):
            leaf.grad = sign * sizes
        adam.step()
        other.step()
    # Adam's epsilon is 1e-8, of gradients of 1.
    assert torch.allclose(tilted[0], plain[0], rtol=1e-6)
    mean = sizes.log().mean().exp()
    factor = ((mean / sizes) ** tilt).clamp(0.25, 4)
    assert not torch.equal(plain[1], start)
    # Two ways to the same moments, a few roundings of float32 a step.
    assert torch.allclose(tilted[1], plain[1] * factor, rtol=1e-5)
    before = tilted[1].detach().clone()
    tilted[1].grad = None
    other.step()
    assert torch.equal(tilted[1], before)
    tilted[1].grad = sizes
    other.zero_grad(set_to_none=False)
    assert not tilted[1].grad.any()
    other.zero_grad(set_to_none=True)
    assert tilted[1].grad is None


def test_frozen_codes_stay_for_the_last_steps() -> None:
    slow, codes = (torch.zeros(1, requires_grad=True) for _ in range(2))
    adam = optimiser(slow, codes)
    run: Any = SimpleNamespace(
        _optimizer=adam, _settings=SimpleNamespace(steps=20), now=SimpleNamespace(step=0)
    )
    freeze_codes(run, 0.5)
    seen = []
    for step in range(20):
        run.now.step = step
        slow.grad, codes.grad = torch.ones(1), torch.ones(1)
        adam.step()
        seen.append((slow.item(), codes.item()))
    assert all(b[1] < a[1] for a, b in pairwise(seen[:10]))
    assert all(b[1] == a[1] for a, b in pairwise(seen[10:]))
    assert all(b[0] < a[0] for a, b in pairwise(seen))


def test_the_last_tenth_of_the_divergences_is_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(1, 1)

    def divergence(total: float, *, weight: float, gradient: bool = True) -> Any:
        return total, rows if gradient else None

    monkeypatch.setattr(loop, "divergence", divergence)
    found: list[float] = []
    with kept_divergences(found):
        for step in range(20):
            # Two micro-batches of a step of eight tokens, and a look at the held-out text.
            loop.divergence(float(step), weight=1 / 8)
            loop.divergence(float(step), weight=1 / 8)
            loop.divergence(1e9, weight=0.0, gradient=False)
    assert loop.divergence is divergence
    assert last_tenth(found, 20) == pytest.approx(2 * (18 + 19) / 8 / 2)
    assert last_tenth(found[:6], 3) == pytest.approx(2 * 2 / 8)
