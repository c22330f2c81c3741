from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from marlinq.core.scheme import INT4
from marlinq.formats import spec_of
from marlinq.methods.gptq import solve_gptq
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.verify.statistics.evidence import MANY, find_faults
from marlinq.operations.verify.statistics.exchanged_codes import find_exchanges, word_tile
from marlinq.operations.verify.statistics.finding import FAILURE, WARNING, RunSize
from marlinq.operations.verify.statistics.noise import DEGREES, distance, log_density, measure_noise
from marlinq.operations.verify.statistics.tails import Tail, tail_of_others
from tests.testing.faults import WORDS, flip_bit, swap_nibbles
from tests.testing.layouts import INTEGERS
from tests.testing.pairs import every_pair
from tests.testing.schemes import scheme
from tests.testing.verified_checkpoints import hessian_of, quantize

K, N = 256, 128
ALL = slice(None)
SMALL = RunSize(K * N, K * N // 64)
# As if the module belonged to a model of 7e9 weights in groups of 64.
LARGE = RunSize(7_000_000_000, 7_000_000_000 // 64)


def heavy_tailed(seed, n=N, k=K):
    """Weights with outliers, some output channels far larger than others, as trained models have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * (1 + 3 * torch.rand(n, k, generator=generator).pow(16))
    return 0.05 * weight * torch.exp(0.7 * torch.randn(n, 1, generator=generator))


def evidence_of(weight, q, layout, run=SMALL, stored=None):
    stored = stored or layout.pack(q)
    spec = replace(spec_of(q), scheme=replace(q.scheme, scale_dtype="float16"))
    return find_faults(weight, layout.unpack(stored, spec), layout, spec, stored, run)


def findings_of(weight, q, layout, run=SMALL, stored=None):
    return evidence_of(weight, q, layout, run, stored).findings


def distance_of(weight, q):
    groups = q.g_idx.long()
    return distance(weight.t(), q.codes.float(), q.scales[groups].float(), q.zeros[groups].float(), 15)


def test_a_tail_bounds_the_chance_it_was_drawn_with():
    generator = torch.Generator().manual_seed(0)
    for spread in (0.5, 1.0, 3.0):
        values = torch.empty(1 << 20).exponential_(1 / spread, generator=generator)
        tail = Tail.fit(values[values > spread], len(values), floor=spread, least_spread=0.1)
        for x in (10 * spread, 20 * spread):
            true = -x / spread
            found = float(tail.log_chance(torch.tensor([x])))
            # The spread's bound is up to 1 + 2 / sqrt(200) = 1.14 of it, twice that above it by chance.
            assert true <= found <= true / 1.3 + math.log(2)


@pytest.mark.parametrize("count", [0, 1, 10])
def test_a_tail_of_few_values_is_cautious(count):
    tail = Tail.fit(torch.full((count,), 6.0), 1000, floor=5.0, least_spread=1.0)
    assert tail.share >= 3 / 1000
    assert tail.spread == pytest.approx(1.0 if not count else max(1.0, 1 + 2 / math.sqrt(count)))
    assert float(tail.log_chance(torch.tensor([4.0]))) == pytest.approx(math.log(tail.share))


def test_a_value_is_judged_by_the_others():
    values = torch.rand(2, 400, generator=torch.Generator().manual_seed(0))
    values[0, 7] = 50.0
    chances = tail_of_others(values, share=0.05, least_spread=0.01)
    assert float(chances[0, 7]) < -500
    assert float(chances[1].min()) > -10
    values[0, 8] = 49.0
    assert float(tail_of_others(values, share=0.05, least_spread=0.01)[0, 7]) > -50


@pytest.mark.parametrize("layout", INTEGERS)
def test_tiles_are_what_the_layout_packs(layout):
    tile = word_tile(INTEGERS[layout], INT4, 64, 128)
    assert tile is not None
    assert tile.slots == 8
    numbers = torch.arange(64 * 128).reshape(64, 128)
    split = tile.split(numbers)
    q = round_to_nearest(heavy_tailed(0, 128, 64), scheme())
    before = INTEGERS[layout].pack(q)[WORDS[layout]].reshape(-1)
    for row, column, word in ((0, 0, 0), (split.shape[0] - 1, split.shape[1] - 1, tile.words - 1)):
        members = split[row, column, word]
        assert tile.place(row, column, word) == divmod(int(members[0]), 128)
        codes = q.codes.clone()
        codes = codes.contiguous()
        codes.view(-1)[members] ^= 1
        after = INTEGERS[layout].pack(replace(q, codes=codes))[WORDS[layout]].reshape(-1)
        (changed,) = (before != after).nonzero()[:, 0].tolist()
        assert bin((int(before[changed]) ^ int(after[changed])) & 0xFFFFFFFF).count("1") == 8


def test_no_tile_where_words_do_not_divide_the_module():
    assert word_tile(INTEGERS["gptq"], INT4, 64, 12) is None


@pytest.mark.parametrize(
    ("group_size", "symmetric", "act_order"),
    every_pair(list(product((32, 64, 128, -1), (True, False), ("none", "static", "scattered")))),
)
def test_no_false_alarm(group_size, symmetric, act_order):
    if act_order == "scattered" and group_size == -1:
        pytest.skip("one group has no order")
    for seed in range(2):
        weight = heavy_tailed(seed)
        q = quantize(weight, group_size=group_size, symmetric=symmetric, act_order=act_order, seed=seed)
        assert not findings_of(weight, q, INTEGERS["gptq-v2"])


def test_no_false_alarm_where_one_channel_rules_its_group():
    weight = heavy_tailed(7)
    hessian = hessian_of(K, 7)
    # Channel 70 is a thousand times as large as the others: its group's scales are fitted to it alone.
    hessian[70] *= 1000
    hessian[:, 70] *= 1000
    q, _ = solve_gptq(weight, hessian, scheme(64))
    levels = (q.codes[64:128].float() - 8) * q.scales[1].float()
    slopes = (levels * weight.t()[64:128]).sum(dim=0) / levels.square().sum(dim=0)
    assert float(slopes.max()) > 1.3
    assert not findings_of(weight, q, INTEGERS["gptq"])


def test_no_false_alarm_on_a_grid_and_on_zeros():
    weight = heavy_tailed(0)
    q = round_to_nearest(weight, scheme(64))
    exact = q.dequantize()
    exact[:8] = 0  # output channels that are pruned
    exact[:, :8] = 0  # and input channels
    again = round_to_nearest(exact, scheme(64))
    assert not findings_of(exact, again, INTEGERS["gptq"])


def test_outputs_with_larger_errors_do_not_look_exchanged():
    """A false alarm of earlier days: sixty times the usual errors in one output of a layer whose noise is
    measured by input channels."""
    generator = torch.Generator().manual_seed(0)
    weight = heavy_tailed(3, n=256)
    q = quantize(weight, group_size=64, symmetric=True, act_order="none", seed=3)
    codes = q.codes.clone()
    jumps = torch.randint(-3, 4, (K,), generator=generator)
    codes[:, 100] = (codes[:, 100].int() + jumps).clamp(0, 15).to(torch.uint8)
    wild = replace(q, codes=codes)
    noise = measure_noise(weight.t(), wild)
    by_channel = replace(noise, local=torch.ones_like(noise.local))
    run = {"most": 4}
    plain = find_exchanges(wild, INTEGERS["gptq"], by_channel, **run)
    local = find_exchanges(wild, INTEGERS["gptq"], noise, **run)
    assert plain.suspects[0].n == 100
    assert plain.suspects[0].evidence > local.suspects[0].evidence + 5
    assert not findings_of(weight, wild, INTEGERS["gptq"])


def test_control_pairs_are_like_the_pairs_of_a_word():
    """The tail that words are judged by is that of right words: as many lie above a level as are expected."""
    seen, expected = 0, 0.0
    for seed in range(8):
        weight = heavy_tailed(seed, n=512, k=512)
        q = quantize(weight, group_size=128, symmetric=True, act_order="static", seed=seed)
        found = find_exchanges(q, INTEGERS["gptq"], measure_noise(weight.t(), q), most=500)
        level = found.tail.start + 0.5
        seen += sum(suspect.evidence > level for suspect in found.suspects)
        expected += found.words * math.exp(float(found.tail.log_chance(torch.tensor([level]))))
    assert expected > 50
    # The fit is an upper bound, a third above its mean; counts vary by their square roots.
    assert expected / 2.5 < seen < expected + 3 * math.sqrt(expected)


# The layout decides what words hold, the group how they are judged: neighbours take turns.
@pytest.mark.parametrize(
    ("layout", "group_size"),
    [
        pytest.param(layout, size, marks=[] if index % 3 == number else pytest.mark.slow)
        for index, layout in enumerate(INTEGERS)
        for number, size in enumerate((32, 128, -1))
    ],
)
def test_one_exchanged_word_is_a_warning_that_names_it(layout, group_size):
    weight = heavy_tailed(1)
    q = quantize(weight, group_size=group_size, symmetric=True, act_order="none", seed=1)
    words = INTEGERS[layout].pack(q)[WORDS[layout]]
    tile = word_tile(INTEGERS[layout], INT4, K, N)
    right = measure_noise(weight.t(), q, tile.rows)
    # 28 pairs of a word's codes and the exchange of all four bytes are tried on each word.
    limit = math.log(words.numel() * 29 / WARNING)
    found = 0
    for pick in torch.randperm(words.numel(), generator=torch.Generator().manual_seed(0))[:20].tolist():
        flat = words.reshape(-1).clone()
        flat[pick] = swap_nibbles(flat[pick : pick + 1])[0]
        stored = {**INTEGERS[layout].pack(q), WORDS[layout]: flat.reshape(words.shape)}
        swapped = INTEGERS[layout].unpack(stored, spec_of(q))
        changed = swapped.codes != q.codes
        evidence = evidence_of(weight, q, INTEGERS[layout], SMALL, stored)
        findings = evidence.findings
        assert not any(finding.fails for finding in findings)
        found += bool(findings)
        # The word hardly widens the noise that it is judged by: 8 of 128 codes of an input channel are cut to
        # 4 times what the median tells, at most 1.28 sigma (of rounding alone). That makes the noise
        # sqrt(1 + (4 * 1.28) ** 2 * 8 / 128) = 1.63 times as wide, and the moved median 7 % more.
        widened = (measure_noise(weight.t(), swapped, tile.rows).sigma(ALL) / right.sigma(ALL))[changed]
        assert float(widened.max()) < 1.63 * 1.07
        if findings:
            # The report names the first code of the word, changed or not; the words of its tile are near.
            assert "the word that holds input channel" in findings[0].what
            assert findings[0].expected < WARNING
            k, n = (int(part.split()[0].rstrip(":")) for part in findings[0].what.split("channel ")[1:3])
            assert all(abs(k - a) < 16 and abs(n - b) < 16 for a, b in changed.nonzero().tolist())
        else:
            # Misses are as unlikely as 29 tries on each word make them, by the noise without the fault.
            # Each code's density falls at most with the power DEGREES + 1 of the widened noise.
            assert evidence.spread == 1.0
            wrong = distance_of(weight, swapped)
            gain = log_density(right.r, right.sigma(ALL)) - log_density(wrong, right.sigma(ALL))
            assert float(gain[changed].sum() - (DEGREES + 1) * widened.log().sum()) < limit
    assert found >= 14


@pytest.mark.parametrize("layout", INTEGERS)
def test_many_exchanged_words_fail(layout):
    weight = heavy_tailed(1)
    q = quantize(weight, group_size=64, symmetric=True, act_order="none", seed=1)
    words = INTEGERS[layout].pack(q)[WORDS[layout]]
    flat = words.reshape(-1).clone()
    picks = torch.randperm(len(flat), generator=torch.Generator().manual_seed(1))[: 6 * MANY]
    flat[picks] = swap_nibbles(flat[picks])
    stored = {**INTEGERS[layout].pack(q), WORDS[layout]: flat.reshape(words.shape)}
    first = findings_of(weight, q, INTEGERS[layout], LARGE, stored)[0]
    assert first.fails
    assert "words in different input and output channels look exchanged" in first.what


@pytest.mark.parametrize("layout", INTEGERS)
def test_codes_exchanged_in_every_word_are_named(layout):
    weight = heavy_tailed(1)
    q = quantize(weight, group_size=64, symmetric=True, act_order="none", seed=1)
    stored = INTEGERS[layout].pack(q)
    stored[WORDS[layout]] = swap_nibbles(stored[WORDS[layout]])
    findings = findings_of(weight, q, INTEGERS[layout], LARGE, stored)
    what = "the whole module: the two codes of every byte are exchanged"
    assert any(finding.what == what and finding.expected < FAILURE for finding in findings if finding.fails)


def test_names_exchanged_input_channels_and_a_damaged_output():
    weight = heavy_tailed(1)
    q = quantize(weight, group_size=64, symmetric=True, act_order="none", seed=1)
    codes = q.codes.clone()
    codes[[18, 21]] = codes[[21, 18]]
    findings = findings_of(weight, replace(q, codes=codes), INTEGERS["gptq"], LARGE)
    assert any("input channel 16 to 23: slots 2 and 5 are exchanged" in f.what for f in findings if f.fails)
    codes = q.codes.clone()
    codes[:, 77] = codes[:, 77].reshape(-1, 2).flip(1).reshape(-1)
    findings = findings_of(weight, replace(q, codes=codes), INTEGERS["gptq"], LARGE)
    what = "the words that begin with output channel 77: the two codes of every byte are exchanged"
    assert any(finding.what == what for finding in findings if finding.fails)


# Two or four times off is within what GPTQ may do to the scales of a layer as small and uneven as this.
@pytest.mark.parametrize(("group_size", "bit"), [(g, bit) for g in (32, 64, -1) for bit in range(12, 16)])
def test_a_flipped_bit_of_a_scale_is_found(group_size, bit):
    weight = heavy_tailed(2)
    q = quantize(weight, group_size=group_size, symmetric=False, act_order="static", seed=2)
    damaged = replace(q, scales=flip_bit(bit)(q.scales))
    if not bool(torch.isfinite(damaged.scales).all()):
        pytest.skip("the flip makes an infinity, which needs no statistics")
    (finding, *_) = findings_of(weight, damaged, INTEGERS["awq"])
    group, column = divmod(q.scales.numel() // 2, N)
    assert finding.what == f"group {group} of output channel {column}: bit {bit} of its scale is flipped"
    assert finding.fails


@pytest.mark.parametrize("by", [-1, 1])
def test_one_zero_point_is_a_warning(by):
    weight = heavy_tailed(3, n=512)
    q = quantize(weight, group_size=64, symmetric=False, act_order="none", seed=3)
    zeros = q.zeros.clone()
    zeros[2, 5] += by
    (finding, *others) = findings_of(weight, replace(q, zeros=zeros), INTEGERS["gptq-v2"])
    word = "high" if by > 0 else "low"
    assert finding.what == f"group 2 of output channel 5: its zero point is one too {word}"
    assert not finding.fails
    assert not others


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ((2, slice(None)), "group 2: its zero points are one too high"),
        ((slice(None), 5), "output channel 5: its zero points are one too high"),
        ((slice(None), slice(None)), "zero points are one too high"),
    ],
)
def test_many_zero_points_fail(place, what):
    weight = heavy_tailed(3)
    q = quantize(weight, group_size=32, symmetric=False, act_order="none", seed=3)
    zeros = q.zeros.clone()
    zeros[place] = (zeros[place] + 1).clamp(max=15)
    findings = findings_of(weight, replace(q, zeros=zeros), INTEGERS["gptq-v2"])
    assert what in {finding.what for finding in findings if finding.fails}


def test_zero_points_that_are_not_stored_are_not_suspected():
    """The other false alarm: a symmetric module has no zero point that could be off on its own."""
    weight = heavy_tailed(3)
    weight[5, 128:192] += 2 * weight[5].abs().mean()
    q = quantize(weight, group_size=64, symmetric=True, act_order="none", seed=3)
    codes = q.codes.clone()
    codes[128:192, 5] = (codes[128:192, 5].int() - 1).clamp(0, 15).to(torch.uint8)
    for layout in ("marlin", "gptq"):
        assert not findings_of(weight, replace(q, codes=codes), INTEGERS[layout])


@pytest.mark.parametrize("layout", ["gptq-v2", "compressed-tensors"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rounded_weights_hide_no_scale_and_no_code(layout, symmetric):
    """Rows with outliers have large scales, which are no alarm; one scale or one code that is wrong is a
    failure wherever it stands."""
    weight = heavy_tailed(8)
    weight[::9, ::40] *= 200
    q = round_to_nearest(weight, scheme(64, symmetric=symmetric))
    assert not findings_of(weight, q, INTEGERS[layout])
    for group, k, n in ((0, 5, 1), (3, 130, 64), (1, 255, 127)):
        scales = q.scales.clone()
        scales[group, n] *= 1.4
        found = findings_of(weight, replace(q, scales=scales), INTEGERS[layout])
        assert found[0].what.startswith(f"group {group} of output channel {n}: its scale is 1.4")
        codes = q.codes.clone()
        codes[k, n] ^= 8
        found = findings_of(weight, replace(q, codes=codes), INTEGERS[layout])
        assert found[0].what.startswith(f"the code of input channel {k} of output channel {n} is ")
        assert found[0].fails


def test_several_wrong_codes_do_not_excuse_each_other():
    weight = heavy_tailed(9)
    q = round_to_nearest(weight, scheme(64))
    codes = q.codes.clone()
    wrong = [(3, 7), (90, 60), (200, 100)]
    for place in wrong:
        codes[place] ^= 8
    found = findings_of(weight, replace(q, codes=codes), INTEGERS["gptq"])
    assert {finding.what.partition(" is ")[0] for finding in found if finding.fails} == {
        f"the code of input channel {k} of output channel {n}" for k, n in wrong
    }


def test_two_exchanged_entries_of_g_idx_are_found():
    weight = heavy_tailed(4)
    q = quantize(weight, group_size=32, symmetric=True, act_order="scattered", seed=4)
    g_idx = q.g_idx.clone()
    g_idx[[7, 200]] = g_idx[[200, 7]]
    assert int(g_idx[7]) != int(q.g_idx[7])
    findings = findings_of(weight, replace(q, g_idx=g_idx), INTEGERS["gptq"], LARGE)
    expected = {
        f"input channel {k} fits group {int(q.g_idx[k])}, g_idx says {int(g_idx[k])}" for k in (7, 200)
    }
    assert expected <= {finding.what for finding in findings if finding.fails}


def test_names_a_transposition_and_a_shift():
    weight = heavy_tailed(5)
    # Without negative scales and with channels alike, so that only the fine differences of scales tell.
    weight = weight / weight.norm(dim=1, keepdim=True)
    q = round_to_nearest(weight, scheme())
    scales = q.scales.t().contiguous().reshape(q.scales.shape)
    first = findings_of(weight, replace(q, scales=scales), INTEGERS["gptq"], LARGE)[0]
    assert (first.what, first.fails) == ("scales are stored transposed", True)
    for axis, name in ((0, "group"), (1, "output channel")):
        shifted = replace(q, scales=q.scales.roll(1, axis))
        first = findings_of(weight, shifted, INTEGERS["gptq"], LARGE)[0]
        assert (first.what, first.fails) == (f"scales are stored one {name} too late", True)


def test_eight_bits():
    weight = heavy_tailed(6)
    q = round_to_nearest(weight, scheme(64, bits=8))
    for layout in ("gptq", "compressed-tensors"):
        assert not findings_of(weight, q, INTEGERS[layout])
    codes = q.codes.clone()
    codes[[8, 9], 3] = codes[[9, 8], 3]
    (finding, *_) = findings_of(weight, replace(q, codes=codes), INTEGERS["gptq"])
    assert finding.what.startswith("the word that holds input channel 8 of output channel 3")
