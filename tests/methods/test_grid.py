from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlinq.core.dtypes import torch_dtype
from marlinq.methods.grid import minmax_grid, search_grid, storable_scales
from tests.testing.schemes import scheme


def _rounding_cost(weight, importance, scales, zeros):
    codes = torch.clamp(torch.round(weight.double() / scales.double() + zeros.double()), 0, 15)
    return importance.double() @ (weight.double() - (codes - zeros) * scales.double()).square()


@given(
    seed=st.integers(0, 2**31),
    exponent=st.integers(-40, 38),
    symmetric=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)
@settings(deadline=None, max_examples=60)
def test_any_magnitude_gives_storable_grids(seed, exponent, symmetric, dtype):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(32, 6, generator=generator).clamp(-3, 3) * 10.0**exponent
    importance = torch.rand(32, generator=generator)
    wanted = scheme(symmetric=symmetric, scale_dtype=dtype)
    for scales, zeros in (
        minmax_grid(weight, wanted),
        search_grid(weight, importance, wanted),
    ):
        assert torch.equal(scales.to(torch_dtype(dtype)).float(), scales)
        assert bool(torch.isfinite(scales).all())
        assert float(scales.abs().min()) >= torch.finfo(torch_dtype(dtype)).tiny
        assert torch.equal(zeros, zeros.round())
        lowest, highest = (8, 8) if symmetric else (1, 15)
        assert lowest <= int(zeros.min()) <= int(zeros.max()) <= highest


def test_symmetric_minmax_is_absmax_over_seven_and_a_half():
    weight = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
    scales, zeros = minmax_grid(weight, scheme(scale_dtype="float32"))
    torch.testing.assert_close(scales, torch.tensor([3.0, 2.0]) / 7.5)
    assert zeros.tolist() == [8, 8]


def test_asymmetric_minmax_spans_the_range_and_zero():
    weight = torch.tensor([[-1.0, 2.0, -4.0], [2.0, 5.0, -2.0]])
    scales, zeros = minmax_grid(weight, scheme(symmetric=False, scale_dtype="float32"))
    assert zeros.tolist() == [5, 1, 15]
    # The second channel has no negative weight: zero point 1 leaves 14 steps up to its maximum.
    torch.testing.assert_close(scales, torch.tensor([3 / 15, 5 / 14, 4 / 15]))


def test_eight_bits():
    weight = torch.linspace(-1, 1, 33).unsqueeze(1)
    scales, zeros = minmax_grid(weight, scheme(bits=8, scale_dtype="float32"))
    assert zeros.tolist() == [128]
    torch.testing.assert_close(scales, torch.tensor([2 / 255]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_all_zero_group_is_stored_exactly(symmetric):
    weight = torch.zeros(32, 3)
    for scales, zeros in (
        minmax_grid(weight, scheme(symmetric=symmetric)),
        search_grid(weight, torch.ones(32), scheme(symmetric=symmetric)),
    ):
        assert torch.equal(_rounding_cost(weight, torch.ones(32), scales, zeros), torch.zeros(3).double())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("uniform", [True, False])
def test_search_beats_minmax(symmetric, uniform):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 500, generator=generator)
    importance = torch.ones(64) if uniform else torch.rand(64, generator=generator).pow(4)
    cost = {
        grid.__name__: _rounding_cost(
            weight, importance, *grid(weight, *extra, scheme(symmetric=symmetric))
        ).sum()
        for grid, extra in ((minmax_grid, ()), (search_grid, (importance,)))
    }
    assert cost["search_grid"] < 0.93 * cost["minmax_grid"]


def test_search_ignores_outliers_that_cost_nothing():
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(32, 40, generator=generator)
    # The least range that is tried is .7 of the full one.
    weight[0] = 1.4 * weight[1:].abs().amax(dim=0)
    importance = torch.ones(32)
    importance[0] = 0
    scales, zeros = search_grid(weight, importance, scheme())
    plain, _ = minmax_grid(weight[1:], scheme())
    assert float((scales.abs() / plain).mean()) < 1.1
    full, _ = minmax_grid(weight, scheme())
    cost = _rounding_cost(weight, importance, scales, zeros)
    # Steps 1.4 times as long have twice the squared error.
    assert cost.sum() < 0.6 * _rounding_cost(weight, importance, full, zeros).sum()


def test_symmetric_search_uses_both_signs():
    # One channel reaches -8 on the negative side, the other is its mirror image.
    weight = torch.arange(-8, 8).float().repeat(2).unsqueeze(1)
    scales, zeros = search_grid(torch.cat([weight, -weight], dim=1), torch.ones(32), scheme())
    assert scales[0] == -scales[1]
    assert scales[0] > 0
    assert zeros.tolist() == [8, 8]


def test_slices_along_the_outputs_change_nothing():
    # More weights than one slice holds, so the last outputs are searched apart from the first.
    weight = torch.randn(512, 1100, generator=torch.Generator().manual_seed(5))
    importance = torch.linspace(0.1, 1, 512)
    scales, _ = search_grid(weight, importance, scheme())
    last, _ = search_grid(weight[:, 1000:].contiguous(), importance, scheme())
    # A different matrix product may break a near-tie the other way, so the costs are compared.
    zeros = torch.full((100,), 8.0)
    torch.testing.assert_close(
        _rounding_cost(weight[:, 1000:], importance, scales[1000:], zeros),
        _rounding_cost(weight[:, 1000:], importance, last, zeros),
        rtol=1e-5,
        atol=0,
    )


def test_storable_scales_keep_sign_and_range():
    scales = storable_scales(torch.tensor([0.0, 1e-12, -1e-12, 1e9, -0.1]), torch.float16)
    tiny, largest = torch.finfo(torch.float16).tiny, 65504.0
    tenth = float(torch.tensor(-0.1).half())
    assert scales.tolist() == [1.0, tiny, -tiny, largest, tenth]
