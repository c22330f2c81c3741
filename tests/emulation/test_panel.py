"""GPTQ's panel kernel on the emulation, inside the GPU's whole solve, against plain solves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault
from marlinq.core.scheme import Scheme
from marlinq.methods.batched_layers import JointWeights, solve_many
from marlinq.methods.factor import channel_order, factorise
from marlinq.methods.gptq import GPTQOptions, solve_gptq_shared
from marlinq.methods.imatrix import round_groups, round_groups_on_gpu
from marlinq.methods.panels import solve_panels
from marlinq.methods.slices import solve_slices
from marlinq.methods.solution import Solution
from tests.emulation.panel import emulated_panel, emulated_panels
from tests.methods.textbook import searched_gptq, textbook_gptq
from tests.testing.layers import make_layer
from tests.testing.pairs import in_turn
from tests.testing.schemes import scheme


def solved(
    builder: Builder,
    weight: Tensor,
    hessian: Tensor,
    wanted: Scheme,
    *,
    clip_search: bool = True,
    seed: int = 0,
) -> Solution:
    """The GPU's solve in the channels' own order, with the emulated kernel."""
    k = hessian.shape[0]
    g = wanted.granularity.channels_per_group(k)
    factor = factorise(hessian, channel_order(hessian, g, "none"), 0.01)
    launch = emulated_panel(builder, seed=seed)
    return solve_panels(weight.t().contiguous(), factor, g, wanted, clip_search=clip_search, launch=launch)


def values(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Values of the codes, float64 [K, N]. A negative scale may name the same values by other codes."""
    g = codes.shape[0] // scales.shape[0]
    wide = (part.repeat_interleave(g, dim=0).double() for part in (scales, zeros))
    scales, zeros = wide
    return (codes.double() - zeros) * scales


def differing(found: Tensor, expected: Tensor) -> Tensor:
    """bool [N], output channels with a value that is more than a rounding of float16 scales away."""
    return ((found - expected).abs() > 2**-10 * expected.abs()).any(dim=0)


# 40 output channels leave part of the second block empty; 200 input channels end in panels of 72, and 576
# and 640 in blocks of 96 and 128.
# Sizes of groups, and input channels.
SIZES = [(32, 192), (64, 128), (128, 640), (256, 512), (96, 576), (-1, 200), (20, 200)]


@pytest.mark.parametrize(("sizes", "symmetric"), in_turn(SIZES, (True, False)))
def test_searched_solution_is_the_float64_references(
    builder: Builder, sizes: tuple[int, int], symmetric: bool
) -> None:
    group_size, k = sizes
    weight, hessian = make_layer(40, k)
    solution = solved(builder, weight, hessian, scheme(group_size, symmetric=symmetric))
    expected = searched_gptq(weight, hessian, group_size=group_size, symmetric=symmetric, damp=0.01)
    # As in test_gptq.py: a weight within float32's rounding of a tie may fall the other way, or two scales
    # cost the same to its last digits, and the output channel goes its own way from there on. Two of 40 are
    # allowed for.
    assert int(differing(values(solution.codes, solution.scales, solution.zeros), expected).sum()) <= 2


@pytest.mark.parametrize(("group_size", "k"), [(32, 192), (128, 256), (-1, 200)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_given_scales_lead_to_the_textbooks_codes(
    builder: Builder, group_size: int, k: int, symmetric: bool
) -> None:
    weight, hessian = make_layer(40, k)
    wanted = scheme(group_size, symmetric=symmetric)
    solution = solved(builder, weight, hessian, wanted, clip_search=False)
    expected = textbook_gptq(weight, hessian, group_size=group_size, symmetric=symmetric, damp=0.01)
    assert int((solution.codes.long() != expected).any(dim=0).sum()) <= 1


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_loss_is_that_of_the_cpus_solve(builder: Builder, scale_dtype: str, bits: int) -> None:
    weight, hessian = make_layer(24, 128, seed=3)
    wanted = scheme(32, bits=bits, scale_dtype=scale_dtype)
    solution = solved(builder, weight, hessian, wanted)
    factor = factorise(hessian, channel_order(hessian, 32, "none"), 0.01)
    plain = solve_slices(weight.t().contiguous(), factor, 32, wanted, clip_search=True)
    found, expected = (values(one.codes, one.scales, one.zeros) for one in (solution, plain))
    same = ~differing(found, expected)
    assert int(same.sum()) >= 23
    # Values reach 2**bits in float32, of which errors of about 1/4 are left: each is known to some roundings
    # of 2**(bits - 23), and the loss is a sum of their squares.
    assert torch.allclose(solution.loss[same], plain.loss[same], rtol=2 ** (bits - 20), atol=0)


def test_zeros_and_extremes(builder: Builder) -> None:
    weight, hessian = make_layer(40, 64)
    weight[0] = 0.0
    weight[1] *= 1e-9
    weight[2, 5] = 3e4
    factor = factorise(hessian, channel_order(hessian, 32, "none"), 0.01)
    for symmetric in (True, False):
        wanted = scheme(32, symmetric=symmetric)
        solution = solved(builder, weight, hessian, wanted)
        plain = solve_slices(weight.t().contiguous(), factor, 32, wanted, clip_search=True)
        assert torch.isfinite(solution.scales).all()
        assert bool((solution.scales != 0).all())
        found, expected = (values(one.codes, one.scales, one.zeros)[:, :3] for one in (solution, plain))
        assert not bool(differing(found, expected).any())


def test_the_schedule_changes_no_bit(builder: Builder) -> None:
    weight, hessian = make_layer(70, 160)
    wanted = scheme(32)
    first, second = (solved(builder, weight, hessian, wanted, seed=seed) for seed in (1, 2))
    for name in ("codes", "scales", "zeros", "loss"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


FAULTS = {
    "rows updated with errors that warp 0 still computes": Planted("errors_there"),
    "rows rounded while other warps still update them": Planted("rows_updated"),
    "candidates compared before every warp has told its best": Planted("candidates_told"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_missing_barrier_is_reported(builder: Builder, name: str) -> None:
    weight, hessian = make_layer(40, 64)
    factor = factorise(hessian, channel_order(hessian, 64, "none"), 0.01)
    launch = emulated_panel(builder, planted=FAULTS[name])
    with pytest.raises(KernelFault, match="may still be reading|without waiting"):
        solve_panels(weight.t().contiguous(), factor, 64, scheme(64), clip_search=True, launch=launch)


@pytest.mark.parametrize(("sizes", "clip_search"), in_turn(((32, 192), (128, 256), (40, 200)), (True, False)))
def test_layers_solved_together_are_solved_alike(
    builder: Builder, sizes: tuple[int, int], clip_search: bool
) -> None:
    group_size, k = sizes
    made = [make_layer(48, k, seed) for seed in range(3)]
    # The second layer's channels are not all alive, the last was never reached.
    made[1][1][5] = made[1][1][:, 5] = 0
    layers = [JointWeights((weight[:40], weight[40:]), hessian) for weight, hessian in made]
    layers.append(JointWeights(layers[0].weights, torch.zeros(k, k)))
    indefinite = layers[0].hessian.clone()
    indefinite[0, 1] = indefinite[1, 0] = 10 * indefinite.max()
    layers.append(JointWeights(layers[0].weights, indefinite))
    wanted = scheme(group_size)
    launch = emulated_panels(builder)
    found = solve_many(
        layers, 5, group_size, wanted, damp=0.01, act_order=True, clip_search=clip_search, launch=launch
    )
    assert found[3:] == [None, None]
    assert solve_many(
        layers[3:4], 5, group_size, wanted, damp=0.01, act_order=True, clip_search=clip_search, launch=launch
    ) == [None]
    (one,) = solve_many(
        layers[:1], 5, group_size, wanted, damp=0.01, act_order=True, clip_search=clip_search, launch=launch
    )
    for mine, other in zip(one or [], found[0] or [], strict=True):
        assert mine[0].difference(other[0]) is None
        assert mine[1] == other[1]
    options = GPTQOptions(clip_search=clip_search)
    for layer, together in zip(layers[:3], found, strict=False):
        assert together is not None
        alone = solve_gptq_shared(layer.weights, layer.hessian, wanted, options)
        for (mine, report), (other, expected) in zip(together, alone, strict=True):
            pairs = (values(each.codes, each.scales, each.zeros) for each in (mine, other))
            # Products round otherwise, so a weight near a tie may fall the other way: see above.
            assert int(differing(*pairs).sum()) <= 2
            assert report.relative_error == pytest.approx(expected.relative_error, rel=2e-2)
            assert report.norm == pytest.approx(expected.norm, rel=1e-5)
            assert report.figures == expected.figures
            assert report.fallback is None


@pytest.mark.parametrize(("group_size", "k"), [(32, 96), (128, 256), (40, 200)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_without_feedback_it_is_the_search_and_fit_of_imatrix(
    builder: Builder, group_size: int, k: int, symmetric: bool
) -> None:
    weight, hessian = make_layer(40, k, seed=5)
    power = hessian.diagonal().reshape(-1, group_size)
    grouped = weight.t().contiguous().reshape(-1, group_size, 40)
    wanted = scheme(group_size, symmetric=symmetric)
    found = round_groups_on_gpu(grouped, power, wanted, launch=emulated_panels(builder))
    expected = round_groups(grouped, power, wanted)
    mine, other = (
        values(codes.reshape(k, 40), scales, zeros) for codes, scales, zeros, _ in (found, expected)
    )
    # A tie between two scales, or of a weight between two codes: one output channel of 40 is allowed for.
    assert int(differing(mine, other).sum()) <= 1
    # Sums of float32 roundings, and what one channel on another of two equally good scales may change.
    assert found[3] == pytest.approx(expected[3], rel=2**-10)
