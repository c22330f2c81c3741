from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Element, Scheme
from marlinq.methods import METHODS, RTNOptions
from marlinq.methods.rtn import round_to_nearest
from tests.testing.schemes import scheme


@given(
    n=st.integers(1, 20),
    groups=st.integers(1, 4),
    group_size=st.sampled_from([32, 64, 128, -1]),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_every_weight_is_within_half_a_step(n, groups, group_size, symmetric, seed):
    k = groups * (32 if group_size == -1 else group_size)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    q = round_to_nearest(weight, scheme(group_size, symmetric=symmetric, scale_dtype="float32"))
    step = q.scales.abs()[q.g_idx.long()].t()
    # A rounded asymmetric zero point moves the range by up to half a step more.
    slack = 0.5 if symmetric else 1.0
    assert bool(((q.dequantize() - weight).abs() <= step * slack * (1 + 1e-5)).all())
    assert q.has_trivial_g_idx
    assert q.channels_per_group == (k if group_size == -1 else group_size)
    if symmetric:
        assert not q.scheme.stores_zeros


def test_weights_on_the_grid_are_reproduced():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 16, (8, 64), generator=generator)
    codes[:, ::32] = 15
    codes[:, 1::32] = 0
    # Exactly absmax = 7.5 steps does not lie on the grid: asymmetric codes 0..15 around zero point 5 do.
    weight = (codes - 5) * 0.125
    q = round_to_nearest(weight, scheme(symmetric=False))
    assert torch.equal(q.dequantize(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_bits(bits):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    q = round_to_nearest(weight, scheme(64, bits=bits))
    error = float((q.dequantize() - weight).abs().max() / weight.abs().max())
    assert 0.25 / 2**bits < error < 1.01 / (2**bits - 1)


def test_low_precision_weights_are_widened_first():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    a = round_to_nearest(weight, scheme())
    b = round_to_nearest(weight.float(), scheme())
    assert a.difference(b) is None


def test_refusals_name_the_module():
    with pytest.raises(UnsupportedError, match=r"mlp\.up: in_features 48 .* group size 32"):
        round_to_nearest(torch.zeros(4, 48), scheme(), name="mlp.up")
    weight = torch.zeros(4, 32)
    weight[1, 2] = torch.nan
    weight[3, 4] = torch.inf
    with pytest.raises(NumericsError, match=r"mlp\.up: 2 of 128 weights"):
        round_to_nearest(weight, scheme(), name="mlp.up")
    with pytest.raises(UnsupportedError, match="expected a weight"):
        round_to_nearest(torch.zeros(2, 4, 32), scheme())


# Uneven steps, ends of different size and an order of its own, so that nothing about integers holds.
CODEBOOK = Element(
    "codebook", 4, (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 5.0, -5.0, 8.0, -8.0, 12, 16, 20, 24, 32)
)


@pytest.mark.parametrize("clip_search", [False, True])
def test_codebook_values_are_reproduced(clip_search):
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor(CODEBOOK.table)
    codes = torch.randint(0, 16, (8, 64), generator=generator)
    codes[:, ::32] = 15
    weight = table[codes] * 0.125
    q = round_to_nearest(weight, Scheme(CODEBOOK, Granularity.group(32), "none"), clip_search=clip_search)
    assert q.scheme == Scheme(CODEBOOK, Granularity.group(32), "none")
    if not clip_search:
        # The largest value is the table's largest, so the scale is exact.
        assert torch.equal(q.dequantize(), weight)
        assert torch.equal(q.codes.t().long(), codes)
    else:
        assert float((q.dequantize() - weight).norm() / weight.norm()) < 0.1


def test_a_codebook_grid_covers_both_sides():
    # The negative side of the table ends at -8, so a range of -1..1 needs steps of 1/8.
    weight = torch.linspace(-1, 1, 32).repeat(2, 1)
    q = round_to_nearest(weight, Scheme(CODEBOOK, Granularity.group(32), "none", "float32"))
    assert q.scales.unique().tolist() == [0.125]
    nearest = (weight[..., None] / 0.125 - torch.tensor(CODEBOOK.table)).abs().amin(dim=-1) * 0.125
    torch.testing.assert_close((q.dequantize() - weight).abs(), nearest)


def test_the_method_reports_the_squared_error():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    searched = RTNOptions(clip_search=True)
    ((q, plain),) = METHODS["rtn"].solve([weight], None, scheme(), RTNOptions(), names=["w"])
    ((_, better),) = METHODS["rtn"].solve([weight], None, scheme(), searched, names=["w"])
    expected = (q.dequantize() - weight).double().square().sum() / weight.double().square().sum()
    # One float32 rounding of each difference.
    assert plain.relative_error == pytest.approx(float(expected), rel=1e-6)
    # For normal weights in groups of 32 shrinking the range gains a few per cent at least.
    assert better.relative_error < 0.97 * plain.relative_error
    assert not METHODS["rtn"].calibrated


def test_methods_refuse_schemes_they_have_no_values_for():
    assert METHODS["rtn"].scheme_refusal(Scheme(CODEBOOK, Granularity.group(32), "none")) is None
    assert "no zero points" in (
        METHODS["rtn"].scheme_refusal(Scheme(CODEBOOK, Granularity.group(32), "stored")) or ""
    )
    assert METHODS["gptq"].scheme_refusal(Scheme(CODEBOOK, Granularity.group(32), "none")) is None
    assert "each output channel alone" in (
        METHODS["gptq"].scheme_refusal(Scheme(CODEBOOK, Granularity.block(2, 32), "none")) or ""
    )
    assert METHODS["gptq"].scheme_refusal(scheme(bits=8)) is None
