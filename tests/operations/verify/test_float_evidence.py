"""Single damaged values and scales of floating-point weights, and what is no damage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.gptq import GPTQOptions, solve_gptq
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.verify.comparison import ABOVE_RTN, FAR_ABOVE_RTN
from marlinq.operations.verify.statistics import find_float_faults
from marlinq.operations.verify.statistics.float_weights import whole_module_faults
from tests.testing.realistic_layers import realistic_layer

SCHEMES = {
    "fp8 channel": Scheme(E4M3, Granularity.channel(), "none", "float32"),
    "fp8 tensor": Scheme(E4M3, Granularity.tensor(), "none", "float32"),
    "fp8 block": Scheme(E4M3, Granularity.block(32, 32), "none", "float32"),
    "mxfp8": Scheme(E4M3, Granularity.group(32), "none", "float8_e8m0fnu"),
    "mxfp4": Scheme(E2M1, Granularity.group(32), "none", "float8_e8m0fnu"),
    "nvfp4": Scheme(E2M1, Granularity.group(16), "none", "float8_e4m3fn", tensor_scale="divides"),
}


def weight() -> Tensor:
    """float32 [96, 160] of bfloat16 values whose rows and columns are of different sizes."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.exp(torch.randn(96, 1, generator=generator) / 2)
    values = torch.randn(96, 160, generator=generator) * sizes * 0.05
    values[3, 7] = 0
    return values.bfloat16().float()


@pytest.fixture(params=SCHEMES)
def rounded(request: pytest.FixtureRequest) -> QuantizedWeight:
    return round_to_nearest(weight(), SCHEMES[request.param])


def test_weights_rounded_to_nearest_are_clean(rounded: QuantizedWeight) -> None:
    found = find_float_faults(weight(), rounded)
    assert found.findings == ()
    assert found.rounded
    assert found.values == 96 * 160


def test_every_bit_of_a_code_but_the_lowest_is_found(rounded: QuantizedWeight) -> None:
    # A lowest bit may move a code by one step, which lies within a step of its weight.
    place = int(rounded.element.decode(rounded.codes).abs().argmax())
    k, n = divmod(place, rounded.out_features)
    for bit in range(1, rounded.element.bits):
        codes = rounded.codes.clone()
        codes[k, n] ^= 1 << bit
        if not bool(torch.isfinite(rounded.element.decode(codes)).all()):
            continue
        (finding,) = find_float_faults(weight(), replace(rounded, codes=codes)).findings
        assert finding.fails
        assert f"of output channel {n}: 1 value not nearest" in finding.what


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_one_scale_of_many_is_found(rounded: QuantizedWeight, factor: float) -> None:
    if rounded.scales.numel() == 1:
        # The error of the module tells.
        return
    scales = rounded.scales.float().clone()
    scales[-1, -1] *= factor
    damaged = replace(rounded, scales=scales.to(rounded.scales.dtype))
    found = find_float_faults(weight(), damaged).findings
    assert found
    assert all(finding.fails for finding in found)
    last = rounded.granularity.outputs_per_group(rounded.out_features)
    for finding in found:
        assert int(finding.what.partition("output channel ")[2].partition(":")[0]) >= 96 - last


@pytest.mark.parametrize("away", [-0.05, 0.05])
def test_scales_wrong_by_one_factor_are_found(rounded: QuantizedWeight, away: float) -> None:
    # No piece stands out, so that the module counted as one that was not rounded to nearest. Half a step of 4
    # bits is a larger part of a value, and so must the factor be.
    factor = 1 + away * (1 if rounded.element is E4M3 else 3)
    (fault,) = whole_module_faults(weight() / factor, rounded)
    assert float(fault.split()[4]) == pytest.approx(1 / factor, abs=0.03)


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("axis", [0, 1])
def test_shifted_scales_are_found(rounded: QuantizedWeight, axis: int, step: int) -> None:
    if rounded.scales.shape[axis] == 1:
        pytest.skip("nothing to shift")
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[rounded.scales.dtype.itemsize]
    scales = rounded.scales.view(size).roll(step, axis).view(rounded.scales.dtype)
    damaged = replace(rounded, scales=scales)
    by_block = rounded.scales.shape[1] < rounded.out_features
    what = ("group", "block of channels" if by_block else "channel")[axis]
    assert f"scales are shifted by one {what}" in whole_module_faults(weight(), damaged)


def test_two_groups_with_each_others_scales_are_one_fault() -> None:
    w = weight()[:, :32]
    w[:, 16:] *= 8
    stored = round_to_nearest(w, SCHEMES["nvfp4"])
    scales = stored.scales.view(torch.uint8).flip(0).view(stored.scales.dtype)
    faults = whole_module_faults(w, replace(stored, scales=scales))
    assert faults.count("scales are shifted by one group") == 1


@pytest.mark.parametrize("scheme", [each for each in SCHEMES if each not in ("fp8 tensor", "fp8 block")])
def test_no_module_as_a_method_left_it_has_wrong_scales(scheme: str) -> None:
    assert whole_module_faults(weight(), round_to_nearest(weight(), SCHEMES[scheme])) == []
    for seed in range(3):
        layer, hessian = realistic_layer(256, 96, seed)
        solved, _ = solve_gptq(layer, hessian, SCHEMES[scheme], GPTQOptions())
        assert whole_module_faults(layer, solved) == []
        flat = torch.full((96, 160), 0.37)
        assert whole_module_faults(flat, round_to_nearest(flat, SCHEMES[scheme])) == []


def test_two_exchanged_scales_are_found(rounded: QuantizedWeight) -> None:
    scales = rounded.scales.clone()
    flat = scales.view(torch.uint8).view(scales.numel(), -1)
    values = rounded.scales.float().flatten()
    most, least = int(values.argmax()), int(values.argmin())
    if most == least:
        return
    flat[[most, least]] = flat[[least, most]]
    assert any(
        finding.fails for finding in find_float_faults(weight(), replace(rounded, scales=scales)).findings
    )


def test_a_quotient_in_bfloat16_is_no_damage(rounded: QuantizedWeight) -> None:
    w = weight()
    scales = rounded.per_output(rounded.scales.float())[rounded.g_idx.long()]
    if rounded.tensor_scale is not None:
        scales = scales / rounded.tensor_scale
    low, high = rounded.element.ends
    quotient = (w.t().bfloat16() / scales.bfloat16()).float().clamp(low, high)
    codes = rounded.element.nearest(quotient)
    assert find_float_faults(w, replace(rounded, codes=codes)).findings == ()


def test_weights_that_a_method_moved_fail_nothing(rounded: QuantizedWeight) -> None:
    w = weight()
    generator = torch.Generator().manual_seed(1)
    moved = w + 0.1 * w.std() * torch.randn(w.shape, generator=generator)
    found = find_float_faults(w, round_to_nearest(moved, rounded.scheme))
    assert not found.rounded
    assert not any(finding.fails for finding in found.findings)


def test_weights_of_which_a_method_moved_half_fail_nothing() -> None:
    """As GPTQ's NVFP4 weights of small layers: half of the pieces keep the bound of rounding to nearest."""
    generator = torch.Generator().manual_seed(6)

    def normal() -> Tensor:
        return torch.randn(64, 64, generator=generator)

    w, moves = normal(), normal()
    moves = moves / torch.stack([normal().square() for _ in range(3)]).mean(dim=0).sqrt()
    stored = round_to_nearest(w + 0.01 * moves * moves.abs().sqrt(), SCHEMES["nvfp4"])
    found = find_float_faults(w, stored)
    assert not found.rounded
    assert not any(finding.fails for finding in found.findings)


def test_damage_of_a_third_of_a_rounded_module_is_found(rounded: QuantizedWeight) -> None:
    if rounded.scales.numel() == 1:
        return
    codes = rounded.codes.clone()
    codes[:, :32] = codes[:, :32].roll(1, 0)
    codes = codes.where(rounded.element.decode(codes).isfinite(), rounded.codes)
    found = find_float_faults(weight(), replace(rounded, codes=codes)).findings
    outputs = {int(one.what.partition("output channel ")[2].partition(":")[0]) for one in found if one.fails}
    assert outputs == set(range(32))


@pytest.mark.parametrize("amount", [0.003, 0.01, 0.02, 0.04])
def test_weights_that_a_method_hardly_moved_fail_nothing(rounded: QuantizedWeight, amount: float) -> None:
    w = weight()
    generator = torch.Generator().manual_seed(2)
    moved = w + amount * w.std() * torch.randn(w.shape, generator=generator)
    found = find_float_faults(w, round_to_nearest(moved, rounded.scheme))
    assert not any(finding.fails for finding in found.findings)


def test_groups_of_zeros_do_not_tell_how_the_others_were_rounded() -> None:
    """GPTQ on few inputs moves few weights, but all of a pruned group, whose scale is small."""
    pruned = weight()
    pruned[:, :80] = 0
    stored = round_to_nearest(pruned, SCHEMES["nvfp4"])
    values = stored.element.decode(stored.codes)
    # 1.25 half steps above the code, as GPTQ leaves some weights.
    nudged = (values == 1) & (torch.arange(96) % 6 == 0)
    moved = torch.where(nudged.t(), stored.dequantize() * 1.3125, pruned)
    one = stored.element.nearest(torch.ones(())).to(torch.uint8)
    codes = stored.codes.clone()
    codes[16:32] = one
    found = find_float_faults(moved, replace(stored, codes=codes))
    assert not found.rounded
    assert not any(finding.fails for finding in found.findings)
    # In a module whose other weights are all rounded to nearest, the same codes are damage.
    found = find_float_faults(pruned, replace(stored, codes=codes))
    assert found.rounded
    assert all(finding.fails for finding in found.findings)
    assert len(found.findings) == 96


@pytest.mark.parametrize(
    ("name", "tokens", "tiny"), [("nvfp4", 4, 0.01), ("nvfp4", 512, 0.1), ("mxfp4", 512, 0.01)]
)
def test_tiny_weights_that_a_method_moved_fail_nothing(name: str, tokens: int, tiny: float) -> None:
    """GPTQ moves tiny weights by many of their steps, and few of the large ones for the tiny ones' errors."""
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(64, 128, generator=generator) * 0.02
    w[:, :64] *= tiny
    inputs = torch.randn(tokens, 128, generator=generator)
    hessian = inputs.t() @ inputs / tokens
    hessian = 0.65 * hessian + 0.35 * hessian.diagonal().diag()
    stored, _ = solve_gptq(w, hessian, SCHEMES[name], GPTQOptions())
    found = find_float_faults(w, stored)
    assert not any(finding.fails for finding in found.findings)


@pytest.mark.parametrize(
    ("name", "tokens", "every", "rest"), [("nvfp4", 4, 2, 0.0), ("nvfp4", 4, 2, 1e-4), ("nvfp4", 64, 4, 0.0)]
)
def test_zeros_within_groups_do_not_tell_how_the_others_were_rounded(
    name: str, tokens: int, every: int, rest: float
) -> None:
    """GPTQ moves zeros by whole steps or not at all, and few weights besides keep a piece near them."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, 128, generator=generator) * 0.02
    w[:, torch.arange(128) % every != 0] *= rest
    inputs = torch.randn(tokens, 128, generator=generator)
    hessian = inputs.t() @ inputs / tokens
    hessian = 0.65 * hessian + 0.35 * hessian.diagonal().diag()
    stored, _ = solve_gptq(w, hessian, SCHEMES[name], GPTQOptions())
    assert not any(finding.fails for finding in find_float_faults(w, stored).findings)
    rounded = round_to_nearest(w, SCHEMES[name])
    codes = rounded.codes.clone()
    codes[:, :12] = 0
    found = find_float_faults(w, replace(rounded, codes=codes))
    assert found.rounded
    assert len(found.findings) == 12 * 8
    assert all(finding.fails for finding in found.findings)


def sparse_weight(seed: int, share: float, *, columns: bool) -> tuple[Tensor, Tensor]:
    """(weights [64, 256], of which this share is not zero, in whole columns or anywhere; Hessian)."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(1 if columns else 64, 256, generator=generator) < share
    w = torch.randn(64, 256, generator=generator) * 0.02 * kept
    inputs = torch.randn(512, 256, generator=generator)
    return w, inputs.t() @ inputs / 512


@pytest.mark.parametrize(
    ("name", "share", "columns"),
    [
        ("nvfp4", 1 / 16, False),
        ("nvfp4", 1 / 32, False),
        ("nvfp4", 1 / 32, True),
        ("mxfp4", 1 / 64, False),
        ("mxfp4", 1 / 32, True),
        ("mxfp8", 1 / 8, False),
        ("mxfp8", 1 / 16, True),
        ("fp8 channel", 1 / 16, False),
    ],
)
def test_zeros_that_a_method_moved_fail_nothing(name: str, share: float, columns: bool) -> None:
    """The other weights, each alone in its piece, are near their codes, and no correction moves them."""
    for seed in range(8):
        w, hessian = sparse_weight(seed, share, columns=columns)
        stored, _ = solve_gptq(w, hessian, SCHEMES[name], GPTQOptions())
        found = find_float_faults(w, stored)
        assert not any(finding.fails for finding in found.findings)
        assert not found.rounded


@pytest.mark.parametrize("share", [1 / 8, 1 / 16, 1 / 32])
def test_damage_of_mostly_zeros_is_found(rounded: QuantizedWeight, share: float) -> None:
    w, _ = sparse_weight(0, share, columns=False)
    stored = round_to_nearest(w, rounded.scheme)
    assert find_float_faults(w, stored).findings == ()

    def fails(damaged: QuantizedWeight) -> set[int]:
        found = find_float_faults(w, damaged)
        assert found.rounded
        return {
            int(each.what.partition("output channel ")[2].partition(":")[0])
            for each in found.findings
            if each.fails
        }

    # Neighbouring codes exchanged in a few output channels.
    exchanged = stored.codes.clone()
    exchanged[:, :5] = exchanged.reshape(-1, 2, 64).flip(1).reshape(-1, 64)[:, :5]
    assert fails(replace(stored, codes=exchanged)) == set(range(5))
    # A zero with the code of a large weight beside it, and that weight with the code of zero.
    k, n = divmod(int(stored.element.decode(stored.codes).abs().argmax()), 64)
    zero = next(each for each in range(k - k % 16, k - k % 16 + 16) if not w[n, each])
    for place, other in (((zero, n), (k, n)), ((k, n), (zero, n))):
        codes = stored.codes.clone()
        codes[place] = stored.codes[other]
        assert fails(replace(stored, codes=codes)) == {n}
    if stored.granularity.kind == "group":
        scales = stored.scales.float()
        scales[0, 7] *= 4
        used = bool((w[7, : stored.channels_per_group] != 0).any())
        assert fails(replace(stored, scales=scales.to(stored.scales.dtype))) == ({7} if used else set())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("share", [0.4, 1 / 4, 1 / 16])
def test_two_moved_zeros_hide_no_other_damage(name: str, share: float) -> None:
    w, _ = sparse_weight(0, share, columns=False)
    stored = round_to_nearest(w, SCHEMES[name])
    codes = stored.codes.clone()
    for n in (20, 40):
        codes[int((w[n] == 0).nonzero()[0]), n] = 1
    k, n = divmod(int(stored.element.decode(stored.codes).abs().argmax()), 64)
    codes[k, n] = 0
    found = find_float_faults(w, replace(stored, codes=codes))
    assert found.rounded
    assert {
        int(each.what.partition("output channel ")[2].partition(":")[0])
        for each in found.findings
        if each.fails
    } == {20, 40, n}


@pytest.mark.parametrize("zeros", [40, 64])
def test_no_method_moves_an_output_channel_of_zeros(zeros: int) -> None:
    w, _ = sparse_weight(0, 1 / 16, columns=False)
    w[:zeros] = 0
    stored = round_to_nearest(w, SCHEMES["nvfp4"])
    codes = stored.codes.clone()
    codes[:, :zeros] = 1
    found = find_float_faults(w, replace(stored, codes=codes))
    assert found.rounded
    assert all(finding.fails for finding in found.findings)
    assert len(found.findings) == 16 * zeros


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_scales_and_nibbles_of_mostly_zeros_after_a_method(name: str) -> None:
    """Whole modules, by the error of all their weights; the bound is ``comparison.FAR_ABOVE_RTN``."""
    w, hessian = sparse_weight(0, 1 / 16, columns=False)
    stored, _ = solve_gptq(w, hessian, SCHEMES[name], GPTQOptions())
    rtn = float((w - round_to_nearest(w, SCHEMES[name]).dequantize()).norm())

    def times(damaged: QuantizedWeight) -> float:
        return float((w - damaged.dequantize()).norm()) / rtn

    assert times(stored) < ABOVE_RTN
    nibbles = stored.codes.reshape(-1, 2, 64).flip(1).reshape(-1, 64)
    assert times(replace(stored, codes=nibbles)) > FAR_ABOVE_RTN
    raw = stored.scales.view(torch.uint8)
    transposed = raw.t().reshape(raw.shape).contiguous().view(stored.scales.dtype)
    assert times(replace(stored, scales=transposed)) > FAR_ABOVE_RTN
    shifted = replace(stored, scales=raw.roll(1, 0).view(stored.scales.dtype))
    assert "scales are shifted by one group" in whole_module_faults(w, shifted)


@pytest.mark.parametrize("channels", [slice(0, 80), slice(80, 160)])
def test_damage_beside_tiny_weights_is_found(channels: slice) -> None:
    w = weight()
    w[:, :80] *= 0.01
    stored = round_to_nearest(w, SCHEMES["nvfp4"])
    codes = stored.codes.clone()
    codes[channels, 3] = 0
    found = find_float_faults(w, replace(stored, codes=codes))
    assert found.rounded
    assert len(found.findings) == 5
    assert all(finding.fails for finding in found.findings)
