from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from marlinq.core.weight import QuantizedWeight
from marlinq.formats import LAYOUTS, spec_of
from marlinq.methods.gptq import solve_gptq
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.verify.evidence import (
    FALSE_ALARM,
    SMALLEST_THRESHOLD,
    TESTS_PER_WEIGHT,
    find_faults,
    threshold,
)
from tests.testing.faults import WORDS, flip_bit, swap_nibbles
from tests.testing.verified_checkpoints import hessian_of, quantize

K, N = 256, 128
# As if this module belonged to a model of 7e9 weights: the threshold is at its highest there.
LIMIT = threshold(7_000_000_000)


def heavy_tailed(seed, n=N, k=K):
    """Weights with outliers, some output channels far larger than others, as trained models have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * (1 + 3 * torch.rand(n, k, generator=generator).pow(16))
    return 0.05 * weight * torch.exp(0.7 * torch.randn(n, 1, generator=generator))


def faults_of(weight, q, layout, limit=LIMIT, stored=None):
    stored = stored or layout.pack(q)
    spec = replace(spec_of(q), scheme=replace(q.scheme, scale_dtype="float16"))
    return find_faults(weight, layout.unpack(stored, spec), layout, spec, stored, limit)


def test_threshold_bounds_the_chance_of_a_false_alarm():
    assert threshold(1) == SMALLEST_THRESHOLD
    for weights in (10**7, 10**11):
        assert math.exp(-threshold(weights)) * TESTS_PER_WEIGHT * weights == pytest.approx(FALSE_ALARM)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", ["none", "static"])
def test_no_false_alarm(group_size, symmetric, act_order):
    for seed in range(4):
        weight = heavy_tailed(seed)
        q = quantize(weight, group_size=group_size, symmetric=symmetric, act_order=act_order, seed=seed)
        assert not faults_of(weight, q, LAYOUTS["gptq-v2"], limit=SMALLEST_THRESHOLD)


def test_no_false_alarm_where_one_channel_rules_its_group():
    weight = heavy_tailed(7)
    hessian = hessian_of(K, 7)
    # Channel 70 is a thousand times as large as the others: its group's scales are fitted to it alone.
    hessian[70] *= 1000
    hessian[:, 70] *= 1000
    q, _ = solve_gptq(weight, hessian, group_size=64, symmetric=True, act_order="static")
    levels = (q.codes[64:128].float() - 8) * q.scales[1].float()
    slopes = (levels * weight.t()[64:128]).sum(dim=0) / levels.square().sum(dim=0)
    assert float(slopes.max()) > 1.3
    assert not faults_of(weight, q, LAYOUTS["gptq"], limit=SMALLEST_THRESHOLD)


def test_no_false_alarm_on_a_grid_and_on_zeros():
    weight = heavy_tailed(0)
    q = round_to_nearest(weight, group_size=64, symmetric=True)
    exact = q.dequantize()
    exact[:8] = 0  # output channels that are pruned
    exact[:, :8] = 0  # and input channels
    again = round_to_nearest(exact, group_size=64, symmetric=True)
    assert not faults_of(exact, again, LAYOUTS["gptq"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_finds_the_word(layout, group_size):
    weight = heavy_tailed(1)
    q = quantize(weight, group_size=group_size, symmetric=True, act_order="none", seed=1)
    words = LAYOUTS[layout].pack(q)[WORDS[layout]]
    octets = words.reshape(-1).view(torch.uint8).reshape(-1, 4).int()
    apart = ((octets >> 4) - (octets & 15)).square().sum(dim=1)
    picks = torch.randperm(len(apart), generator=torch.Generator().manual_seed(0))[:20].tolist()
    found = 0
    for pick in picks:
        flat = words.reshape(-1).clone()
        flat[pick] = swap_nibbles(flat[pick : pick + 1])[0]
        stored = {**LAYOUTS[layout].pack(q), WORDS[layout]: flat.reshape(words.shape)}
        faults = faults_of(weight, q, LAYOUTS[layout], threshold(K * N), stored)
        found += bool(faults)
        if faults:
            changed = (LAYOUTS[layout].unpack(stored, spec_of(q)).codes != q.codes).nonzero().tolist()
            # The report names the first code of the word, changed or not; the words of its tile are near.
            assert "the word that holds input channel" in faults[0].what
            k, n = (int(part.split()[0].rstrip(":")) for part in faults[0].what.split("channel ")[1:3])
            near = [abs(k - a) < 16 and abs(n - b) < 16 for a, b in changed]
            assert all(near)
        else:
            # What is missed had little to exchange: four pairs that differ by 4 give 64.
            assert int(apart[pick]) < 60
    assert found >= 10


# Twice off is within what GPTQ does to the channelwise scales of a layer as uneven as this one.
@pytest.mark.parametrize(
    ("group_size", "bit"), [(g, bit) for g in (32, 64, -1) for bit in range(10, 16) if (g, bit) != (-1, 10)]
)
def test_finds_the_bit(group_size, bit):
    weight = heavy_tailed(2)
    q = quantize(weight, group_size=group_size, symmetric=False, act_order="static", seed=2)
    damaged = replace(q, scales=flip_bit(bit)(q.scales))
    if not bool(torch.isfinite(damaged.scales).all()):
        pytest.skip("the flip makes an infinity, which needs no statistics")
    (fault, *_) = faults_of(weight, damaged, LAYOUTS["awq"], threshold(K * N))
    group, column = divmod(q.scales.numel() // 2, N)
    assert fault.what == f"group {group} of output channel {column}: bit {bit} of its scale is flipped"


@pytest.mark.parametrize("by", [-1, 1])
def test_finds_one_zero_point(by):
    weight = heavy_tailed(3)
    q = quantize(weight, group_size=64, symmetric=False, act_order="none", seed=3)
    zeros = q.zeros.clone()
    zeros[2, 5] += by
    (fault, *_) = faults_of(weight, replace(q, zeros=zeros), LAYOUTS["gptq-v2"], threshold(K * N))
    assert (
        fault.what == f"group 2 of output channel 5: its zero point is one too {'high' if by > 0 else 'low'}"
    )


def test_finds_one_entry_of_g_idx():
    weight = heavy_tailed(4)
    q = quantize(weight, group_size=32, symmetric=True, act_order="scattered", seed=4)
    g_idx = q.g_idx.clone()
    g_idx[[7, 200]] = g_idx[[200, 7]]
    assert int(g_idx[7]) != int(q.g_idx[7])
    found = {fault.what for fault in faults_of(weight, replace(q, g_idx=g_idx), LAYOUTS["gptq"])}
    expected = {
        f"input channel {k} fits group {int(q.g_idx[k])}, g_idx says {int(g_idx[k])}" for k in (7, 200)
    }
    assert expected <= found


def test_names_a_transposition():
    weight = heavy_tailed(5)
    # Without negative scales and with channels alike, so that only the fine differences of scales tell.
    weight = weight / weight.norm(dim=1, keepdim=True)
    q = round_to_nearest(weight, group_size=32, symmetric=True)
    scales = q.scales.t().contiguous().reshape(q.scales.shape)
    found = [fault.what for fault in faults_of(weight, replace(q, scales=scales), LAYOUTS["gptq"])]
    assert "scales are stored transposed" in found


def test_eight_bits():
    weight = heavy_tailed(6)
    q = round_to_nearest(weight, group_size=64, symmetric=True, bits=8)
    assert isinstance(q, QuantizedWeight)
    for layout in ("gptq", "compressed-tensors"):
        assert not faults_of(weight, q, LAYOUTS[layout])
    codes = q.codes.clone()
    codes[[8, 9], 3] = codes[[9, 8], 3]
    (fault, *_) = faults_of(weight, replace(q, codes=codes), LAYOUTS["gptq"])
    assert fault.what.startswith("the word that holds input channel 8 of output channel 3")
