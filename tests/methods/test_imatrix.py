from __future__ import annotations

import pytest
import torch

from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.methods.imatrix import Imatrix, ImatrixOptions, InputPower
from marlinq.methods.rtn import round_to_nearest
from tests.testing.schemes import scheme

K, N, G = 64, 40, 32
CPU = torch.device("cpu")


def gathered(x: torch.Tensor) -> InputPower:
    power = InputPower(x.shape[-1], device=CPU, name="q_proj")
    power.add(x)
    return power


def weight_and_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    strength = torch.logspace(-2, 1, K)[torch.randperm(K, generator=generator)]
    return torch.randn(N, K, generator=generator), torch.randn(200, K, generator=generator) * strength


def weighted_error(weight: torch.Tensor, dense: torch.Tensor, x: torch.Tensor) -> float:
    return float(((weight - dense).square() * x.square().mean(0)).sum())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [G, -1])
def test_strong_inputs_lose_less(symmetric: bool, group_size: int) -> None:
    weight, x = weight_and_inputs()
    wanted = scheme(group_size=group_size, symmetric=symmetric)
    [(found, report)] = Imatrix().solve([weight], gathered(x), wanted, ImatrixOptions(), names=["q_proj"])
    mine = weighted_error(weight, found.dequantize(), x)
    searched = round_to_nearest(weight, wanted, clip_search=True)
    assert mine < 0.9 * weighted_error(weight, searched.dequantize(), x)
    norm = weighted_error(weight, torch.zeros_like(weight), x)
    # The report weighs with float32 means: 200 roundings of 2**-24 at most.
    assert report.relative_error == pytest.approx(mine / norm, rel=200 * 2**-24)
    assert found.scheme == wanted


def test_weights_solved_together_are_solved_as_alone() -> None:
    weight, x = weight_and_inputs()
    power, wanted = gathered(x), scheme(group_size=G)
    together = Imatrix().solve([weight[:8], weight[8:]], power, wanted, ImatrixOptions(), names=["a", "b"])
    [(whole, _)] = Imatrix().solve([weight], power, wanted, ImatrixOptions(), names=["ab"])
    assert torch.equal(torch.cat([part.dequantize() for part, _ in together]), whole.dequantize())


def test_power_is_the_mean_square_however_it_comes() -> None:
    _, x = weight_and_inputs()
    whole = gathered(x)
    parts = gathered(x[:30])
    parts.add(
        torch.cat([x[30:60], x[:5]]).reshape(5, 7, K), mask=torch.arange(7)[None] < torch.tensor([[6]] * 5)
    )
    torch.testing.assert_close(whole.importance(), x.square().mean(0), rtol=1e-6, atol=0)
    first, second = gathered(x[:50]), gathered(x[50:])
    first.merge(second)
    assert first.tokens == 200
    torch.testing.assert_close(first.importance(), whole.importance(), rtol=1e-6, atol=0)
    assert parts.tokens == 60


def test_a_layer_that_was_never_reached_says_so() -> None:
    weight, _ = weight_and_inputs()
    power = InputPower(K, device=CPU, name="q_proj")
    [(found, report)] = Imatrix().solve(
        [weight], power, scheme(group_size=G), ImatrixOptions(), names=["q_proj"]
    )
    assert report.fallback == "no importance: the calibration never reached this layer"
    assert bool(torch.isfinite(found.dequantize()).all())


def test_dead_channels_keep_finite_weights() -> None:
    weight, x = weight_and_inputs()
    x[:, :G] = 0
    [(found, _)] = Imatrix().solve(
        [weight], gathered(x), scheme(group_size=G), ImatrixOptions(), names=["q_proj"]
    )
    error = (found.dequantize() - weight)[:, :G].square().sum() / weight[:, :G].square().sum()
    # Round-to-nearest of a normal distribution in groups of 32 at 4 bits.
    assert float(error) < 0.02


def test_inputs_that_are_not_finite_are_named() -> None:
    weight, x = weight_and_inputs()
    x[3, 5] = float("nan")
    with pytest.raises(NumericsError, match="q_proj: 1 of 64 input channels are NaN"):
        Imatrix().solve([weight], gathered(x), scheme(group_size=G), ImatrixOptions(), names=["q_proj"])
    with pytest.raises(UnsupportedError, match="does not see every token once"):
        InputPower(K, device=CPU, name="q_proj").add(x[:6], mask=torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_agrees_with_the_cpu(symmetric: bool, dtype: torch.dtype) -> None:
    weight, x = weight_and_inputs()
    weight, wanted = weight.to(dtype), scheme(group_size=G, symmetric=symmetric)
    power = gathered(x)
    [(expected, report)] = Imatrix().solve([weight], power, wanted, ImatrixOptions(), names=["q_proj"])
    on_gpu = InputPower(K, device=torch.device("cuda", 0), name="q_proj")
    on_gpu.merge(power)
    [(found, mine)] = Imatrix().solve([weight.cuda()], on_gpu, wanted, ImatrixOptions(), names=["q_proj"])
    assert found.scheme == wanted
    dense = found.to(CPU).dequantize()
    # A tie between two scales, or of a weight between two codes: one output channel of 40 is allowed for.
    differs = (dense - expected.dequantize()).abs() > 2**-10 * expected.dequantize().abs()
    assert int(differs.any(dim=1).sum()) <= 1
    assert mine.relative_error == pytest.approx(report.relative_error, rel=2**-10)
