from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.methods.rtn import round_to_nearest


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
    q = round_to_nearest(weight, group_size=group_size, symmetric=symmetric, scale_dtype=torch.float32)
    step = q.scales.abs()[q.g_idx.long()].t()
    # A rounded asymmetric zero point moves the range by up to half a step more.
    slack = 0.5 if symmetric else 1.0
    assert bool(((q.dequantize() - weight).abs() <= step * slack * (1 + 1e-5)).all())
    assert q.has_trivial_g_idx
    assert q.group_size == (k if group_size == -1 else group_size)
    if symmetric:
        assert not q.scheme.stores_zeros


def test_weights_on_the_grid_are_reproduced():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 16, (8, 64), generator=generator)
    codes[:, ::32] = 15
    codes[:, 1::32] = 0
    # Exactly absmax = 7.5 steps does not lie on the grid: asymmetric codes 0..15 around zero point 5 do.
    weight = (codes - 5) * 0.125
    q = round_to_nearest(weight, group_size=32, symmetric=False)
    assert torch.equal(q.dequantize(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_bits(bits):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    q = round_to_nearest(weight, group_size=64, symmetric=True, bits=bits)
    error = float((q.dequantize() - weight).abs().max() / weight.abs().max())
    assert 0.25 / 2**bits < error < 1.01 / (2**bits - 1)


def test_low_precision_weights_are_widened_first():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    a = round_to_nearest(weight, group_size=32, symmetric=True)
    b = round_to_nearest(weight.float(), group_size=32, symmetric=True)
    assert a.difference(b) is None


def test_refusals_name_the_module():
    with pytest.raises(UnsupportedError, match=r"mlp\.up: in_features 48 .* group size 32"):
        round_to_nearest(torch.zeros(4, 48), group_size=32, symmetric=True, name="mlp.up")
    weight = torch.zeros(4, 32)
    weight[1, 2] = torch.nan
    weight[3, 4] = torch.inf
    with pytest.raises(NumericsError, match=r"mlp\.up: 2 of 128 weights"):
        round_to_nearest(weight, group_size=32, symmetric=True, name="mlp.up")
    with pytest.raises(UnsupportedError, match="expected a weight"):
        round_to_nearest(torch.zeros(2, 4, 32), group_size=32, symmetric=True)
