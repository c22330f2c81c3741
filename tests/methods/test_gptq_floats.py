"""GPTQ on grids of floats: FP4 values with scales that are powers of two, or E4M3 under a second level."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.core.float_elements import E2M1
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme, TensorScale
from marlinq.core.schemes import SCHEMES
from marlinq.methods import METHODS
from marlinq.methods.gptq import GPTQOptions, solve_gptq, solve_gptq_shared
from marlinq.methods.grid import nearest_scales, storable_scales
from marlinq.methods.rtn import round_to_nearest
from marlinq.methods.second_level import first_level, second_level
from marlinq.methods.solution import refit
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe

_spec = importlib.util.spec_from_file_location("textbook", Path(__file__).with_name("textbook.py"))
assert _spec is not None
assert _spec.loader is not None
_textbook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_textbook)

FP4 = ("mxfp4", "nvfp4")
PLAIN = GPTQOptions(clip_search=False, act_order="none")


def scheme(name: str, use: TensorScale = "multiplies") -> Scheme:
    named = SCHEMES[name]
    found = named.example(Scheme(named.element, Granularity.group(32), "none"))
    return replace(found, tensor_scale=use) if named.two_levels else found


@pytest.mark.parametrize("name", FP4)
def test_same_solution_as_the_textbook(make_layer: Any, name: str) -> None:
    weight, hessian = make_layer(24, 128)
    wanted = scheme(name)
    found, _ = solve_gptq(weight, hessian, wanted, PLAIN)
    if name == "mxfp4":
        unit = torch.ones(())

        def scale(largest: Tensor) -> Tensor:
            return torch.exp2(torch.ceil(torch.log2(largest / 6)))

    else:
        assert found.tensor_scale is not None
        unit = found.tensor_scale

        def scale(largest: Tensor) -> Tensor:
            return (largest / 6).float().to(torch.float8_e4m3fn).double()

    expected = _textbook.textbook_floats(
        weight / unit,
        hessian,
        group_size=wanted.granularity.channels,
        scale=scale,
        values=torch.tensor(E2M1.table, dtype=torch.float64),
        damp=0.01,
    )
    # float32 against float64: an output channel follows its own tie from where a weight lies within rounding
    # of one; one such channel of 24 is allowed for. The others differ by the rounding of the last product.
    close = torch.isclose(found.dequantize().double(), expected * unit.double(), rtol=2**-22, atol=0)
    assert int((~close).any(dim=1).sum()) <= 1


@pytest.mark.parametrize("name", FP4)
def test_each_step_lowers_the_loss(make_layer: Any, name: str) -> None:
    losses: dict[str, float] = {}
    wanted = scheme(name)
    for seed in range(2):
        weight, hessian = make_layer(32, 128, seed)
        results = {
            "rounded": round_to_nearest(weight, wanted),
            "searched": round_to_nearest(weight, wanted, clip_search=True),
            "gptq": solve_gptq(weight, hessian, wanted, PLAIN)[0],
            "gptq searched": solve_gptq(weight, hessian, wanted, GPTQOptions())[0],
        }
        for label, q in results.items():
            assert q.scheme == wanted
            loss = _textbook.layer_loss(weight, q.dequantize(), hessian)
            losses[label] = losses.get(label, 0) + loss
    assert losses["searched"] < 0.95 * losses["rounded"]
    assert losses["gptq"] < 0.75 * losses["rounded"]
    assert losses["gptq searched"] < 0.85 * losses["gptq"]


@pytest.mark.parametrize("use", ["multiplies", "divides"])
def test_reported_error_is_the_loss_of_each_weight(make_layer: Any, use: TensorScale) -> None:
    """Weights of different sizes have second levels of their own."""
    weight, hessian = make_layer(16, 64)
    both = [weight, 1000 * weight[:8]]
    for solved, original in zip(solve_gptq_shared(both, hessian, scheme("nvfp4", use)), both, strict=True):
        q, report = solved
        assert report.relative_error == pytest.approx(
            _textbook.layer_loss(original, q.dequantize(), hessian), rel=1e-4
        )
        norm = ((original.double() @ hessian.double()) * original).sum()
        assert report.norm == pytest.approx(float(norm), rel=1e-4)


def test_both_levels_are_searched(make_layer: Any) -> None:
    """The second level lies in the octave above the least that holds the weight; scales stay in range."""
    found = set()
    for seed in range(3):
        weight, hessian = make_layer(16, 64, seed)
        q, _ = solve_gptq(weight, hessian, scheme("nvfp4"))
        least = second_level(weight, scheme("nvfp4"))
        assert least is not None
        assert q.tensor_scale is not None
        found.add(float(q.tensor_scale / least))
        assert bool(torch.isfinite(q.scales.float()).all())
    assert found <= {2.0 ** (trial / 4) for trial in range(4)} | {
        float(torch.tensor(2.0 ** (trial / 4))) for trial in range(4)
    }
    assert len(found) > 1


def test_fitted_scales_are_no_worse(make_layer: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    wanted = 2 ** (4 * torch.randn(200, generator=generator))
    for dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        stored = nearest_scales(wanted, dtype)
        assert torch.equal(stored.to(dtype).float(), stored)
        inside = (wanted > torch.finfo(dtype).tiny) & (wanted < torch.finfo(dtype).max)
        up = storable_scales(stored * 1.01, dtype)
        for other in (up, stored / 2, stored * 2):
            assert bool(((stored - wanted).abs() <= (other - wanted).abs())[inside].all())
    # A fit that would turn a scale's sign is left out: scales of 8 bits are magnitudes.
    reached, terms = torch.ones(4, 3), torch.full((4, 3), -5.0)
    assert torch.equal(refit(torch.ones(3), reached, terms, torch.float8_e4m3fn), torch.ones(3))


def test_zeros_and_first_levels() -> None:
    wanted = scheme("nvfp4", "divides")
    q, report = solve_gptq(torch.zeros(4, 32), torch.eye(32), wanted)
    assert not bool(q.dequantize().any())
    assert report.relative_error == 0
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    second = second_level(weight, wanted)
    assert second is not None
    assert float(first_level(weight, second, wanted).abs().max()) == pytest.approx(448 * 6)


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_fp8_is_made_where_an_override_asks_for_it(make_layer: Any, name: str) -> None:
    weight, hessian = make_layer(16, 64)
    losses = [
        _textbook.layer_loss(weight, q.dequantize(), hessian)
        for q in (
            round_to_nearest(weight, scheme(name)),
            solve_gptq(weight, hessian, scheme(name), GPTQOptions())[0],
        )
    ]
    assert losses[1] < 0.75 * losses[0]
    method = METHODS["gptq"]
    assert method.scheme_refusal(scheme(name)) is None
    assert not method.takes_unasked(scheme(name))
    usual = Recipe(scheme=name, format="compressed-tensors")
    asked = usual.replace(overrides=(Override("up_proj", settings={"scheme": name, "damp": 0.02}),))
    outcomes = [asked.rules.outcome(module) for module in ("model.down_proj", "model.up_proj")]
    assert [getattr(outcome, "method", None) for outcome in outcomes] == ["rtn", "gptq"]


def test_shared_scales_are_refused() -> None:
    assert "each output channel alone" in str(METHODS["gptq"].scheme_refusal(scheme("fp8-block")))
    assert "each output channel alone" in str(METHODS["gptq"].scheme_refusal(scheme("fp8-static")))
