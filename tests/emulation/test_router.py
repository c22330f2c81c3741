"""The router on the emulation: choices, corrected scores, groups of experts, equal logits."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, apart
from marlinq.kernels.step import router
from tests.emulation.step import DTYPES, constants, given, poisoned, results, start
from tests.kernels.step_problems import expected_groups, relative_error
from tests.testing.pairs import every_pair, slow_but


def route(
    builder: Builder,
    x: Tensor,
    weight: Tensor,
    top: int,
    scoring: str,
    *,
    normalised: bool,
    scale: float = 1.0,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
    groups: tuple[int, int, bool] = (1, 1, False),
    wide: bool = False,
    gate: Tensor | None = None,
    gates: Tensor | None = None,
    clusters: bool = True,
    planted: Planted | None = None,
    corrects_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """The kernel's numbers and weights; the shared expert's go to ``gates``."""
    m = x.shape[0]
    ids = apart(torch.full((m, top), -1, dtype=torch.int32))
    weights = poisoned(m, top, dtype=torch.float32)
    prepared = router(
        *(x, weight, ids, weights),
        scoring=scoring,
        normalised=normalised,
        scale=scale,
        bias=bias,
        correction=correction,
        corrects_logits=corrects_logits,
        factors=factors,
        groups=groups[0],
        kept=groups[1],
        zeroed=groups[2],
        wide=wide,
        gate=gate,
        gates=gates,
        clusters=clusters,
    )
    memory = [
        *given(x=x),
        *constants(weight=weight, bias=bias, correction=correction, factors=factors, gate=gate),
        *results(ids=ids, weights=weights, gates=gates),
    ]
    start(builder, prepared, memory, capability=90 if clusters else 80, planted=planted)
    return ids, weights


# Experts, width, how many are taken, scoring, normalised, scale.
ROUTERS = [
    (4, 64, 2, "softmax", False, 1.0),
    (128, 320, 8, "softmax", True, 1.0),
    (60, 2056, 4, "sigmoid", True, 2.5),
    (512, 128, 10, "sigmoid", False, 1.0),
]


@pytest.mark.parametrize(
    ("values", "dtype", "clusters"), every_pair(list(product(ROUTERS, DTYPES, (True, False))))
)
def test_routers(
    builder: Builder, values: tuple[int, int, int, str, bool, float], dtype: torch.dtype, clusters: bool
) -> None:
    experts, width, top, scoring, normalised, scale = values
    torch.manual_seed(3)
    # Eighths, of which sums are exact, so that rounding exchanges nothing and many logits are equal.
    x = apart((2 * torch.randn(3, width + 8)).round().clamp(-3, 3).to(dtype)[:, :width])
    weight = apart((2 * torch.randn(experts, width)).round().clamp(-3, 3).div(64).to(dtype))
    bias = apart(torch.randn(experts).round()) if normalised else None
    factors = apart(torch.randn(experts)) if scale == 1 else None
    ids, weights = route(
        *(builder, x, weight, top, scoring),
        normalised=normalised,
        scale=scale,
        bias=bias,
        factors=factors,
        clusters=clusters,
    )
    added = 0.0 if bias is None else bias.double()
    logits = (x.double() @ weight.double().T + added).to(dtype).double()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    taken = (-logits).sort(dim=-1, stable=True).indices[:, :top]
    expected = scores.gather(1, taken)
    if normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    if factors is not None:
        expected = expected * factors[taken].double()
    assert torch.equal(ids.long(), taken)
    # A few hundred terms of float32 and an exponential of 2 ulp.
    assert relative_error(weights, scale * expected) < 1e-6


def check_correction(
    builder: Builder,
    scoring: str = "sigmoid",
    *,
    experts: int = 60,
    rows: int = 3,
    top: int = 4,
    groups: tuple[int, int, bool] = (1, 1, False),
    shift: float = 0.0,
    normalised: bool = True,
    clusters: bool = True,
    planted: Planted | None = None,
    of_logits: bool = False,
) -> None:
    """Corrected scores or logits choose, weights are of the scores; logits keep float32's digits."""
    torch.manual_seed(6)
    dtype = torch.bfloat16
    x = apart(torch.randn(rows, 264).to(dtype)[:, :256])
    weight = apart(torch.randn(experts, 256).div(16).to(dtype))
    correction = apart(torch.randn(experts) / (2 if scoring == "sigmoid" else 30) + shift)
    ids, weights = route(
        *(builder, x, weight, top, scoring),
        normalised=normalised,
        scale=2.5,
        correction=correction,
        corrects_logits=of_logits,
        groups=groups,
        wide=True,
        clusters=clusters,
        planted=planted,
    )
    logits = x.double() @ weight.double().T
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    decisive = (logits if of_logits else scores) + correction.double()
    count, kept, zeroed = groups
    if count > 1:
        decisive = expected_groups(decisive, count, kept, zeroed=zeroed)
    taken = (-decisive).sort(dim=-1, stable=True).indices[:, :top]
    assert torch.equal(ids.long(), taken)
    if count > 1:
        plain = (scores + correction.double()).sort(-1, descending=True).indices[:, :top]
        assert not torch.equal(taken, plain)
    assert not torch.equal(taken, logits.sort(-1, descending=True).indices[:, :top])
    expected = scores.gather(1, taken)
    if normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    # Sums of 256 products in float32, and exponentials of 2 ulp.
    assert relative_error(weights, 2.5 * expected) < 2e-6


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("scoring", "experts"), [("sigmoid", 60), ("softmax", 300)])
@pytest.mark.parametrize("normalised", [True, False])
def test_corrected_routers(
    builder: Builder, scoring: str, experts: int, normalised: bool, clusters: bool
) -> None:
    check_correction(builder, scoring, experts=experts, normalised=normalised, clusters=clusters)


def test_corrected_logits(builder: Builder) -> None:
    check_correction(builder, top=1, normalised=False, of_logits=True)


# Groups of more and of fewer experts than lanes, as many as lanes, and all but one or one of them kept.
GROUPS = [
    (256, 8, (8, 4, False), 0.0, True),
    (256, 8, (8, 4, True), 0.0, False),
    # All sums are negative, so what counts as zero comes first.
    (256, 8, (8, 4, True), -4.0, True),
    (64, 2, (32, 1, False), 0.0, True),
    (100, 16, (4, 3, False), 0.0, False),
    (96, 3, (2, 1, False), -4.0, True),
]


@pytest.mark.parametrize(("experts", "top", "groups", "shift", "clusters"), GROUPS)
def test_groups_of_experts(
    builder: Builder,
    experts: int,
    top: int,
    groups: tuple[int, int, bool],
    shift: float,
    clusters: bool,
) -> None:
    check_correction(builder, experts=experts, top=top, groups=groups, shift=shift, clusters=clusters)


def check_best_of_groups(builder: Builder, planted: Planted | None = None) -> None:
    """Without a correction a group's value is its highest logit."""
    torch.manual_seed(8)
    x = apart(torch.randn(6, 128).half())
    weight = apart(torch.randn(96, 128).div(8).half())
    ids, weights = route(
        builder,
        x,
        weight,
        6,
        "softmax",
        normalised=False,
        scale=16.0,
        groups=(8, 3, False),
        wide=True,
        planted=planted,
    )
    logits = x.double() @ weight.double().T
    taken = expected_groups(logits, 8, 3, zeroed=False, summed=1).sort(-1, descending=True).indices[:, :6]
    for other in (logits, expected_groups(logits, 8, 3, zeroed=False)):
        assert not torch.equal(taken, other.sort(-1, descending=True).indices[:, :6])
    assert torch.equal(ids.long(), taken)
    # Sums of 128 products in float32, and exponentials of 2 ulp.
    assert relative_error(weights, 16 * logits.softmax(-1).gather(1, taken)) < 2e-6


def test_groups_are_valued_by_their_best_expert_without_a_correction(builder: Builder) -> None:
    check_best_of_groups(builder)


@pytest.mark.parametrize(
    ("groups", "kept", "corrected"),
    [(3, 1, True), (8, 4, True), (4, 5, True), (4, 1, True), (4, 2, False)],
)
def test_groups_that_do_not_fit_are_refused(groups: int, kept: int, corrected: bool) -> None:
    x, weight = torch.zeros(2, 64, dtype=torch.float16), torch.zeros(8, 64, dtype=torch.float16)
    ids, weights = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=f"{kept} of {groups} groups"):
        router(
            *(x, weight, ids, weights),
            scoring="sigmoid",
            normalised=True,
            correction=torch.zeros(8) if corrected else None,
            groups=groups,
            kept=kept,
            zeroed=not corrected,
        )


def check_equal_logits(builder: Builder, planted: Planted | None = None) -> None:
    """Logits 1, 2, 3, 3, ... of 64 experts, of which four are equal; then -0 and 0, which are."""
    x = apart(torch.eye(1, 64, dtype=torch.float16))
    weight = torch.zeros(64, 64, dtype=torch.float16)
    weight[:, 0] = torch.linspace(0, 1, 64)
    weight[[3, 20, 40, 63], 0] = 3.0
    ids, weights = route(builder, x, apart(weight), 3, "softmax", normalised=True, scale=2.5, planted=planted)
    assert ids.tolist() == [[3, 20, 40]]
    assert torch.allclose(weights, torch.full((1, 3), 2.5 / 3))
    x = apart(torch.full((1, 64), 0.125, dtype=torch.float16))
    weight = torch.full((64, 64), -1.0, dtype=torch.float16)
    # The logit of 3 is a quarter of the smallest number below 0.
    weight[[3, 5]], weight[3, 0] = 0.0, -(2.0**-23)
    ids, _ = route(builder, x, apart(weight), 2, "softmax", normalised=True, planted=planted)
    assert ids.tolist() == [[3, 5]]


def test_equal_logits_go_to_the_lowest_numbers(builder: Builder) -> None:
    check_equal_logits(builder)


CORRECTION_FAULTS = {
    "no correction": ("sigmoid", Planted("corrected_scores", "score(mine[i], highest, all)")),
    "a correction of other experts": (
        "sigmoid",
        Planted("corrected_scores", "score(mine[i], highest, all) + correction[lane]"),
    ),
    "a logit in the place of its score": (
        "sigmoid",
        Planted("corrected_scores", "mine[i] + correction[lane + 32 * i]"),
    ),
    "another expert's logit": ("sigmoid", Planted("chosen_logit", "mine[0]")),
    "logits rounded to 16 bits": ("sigmoid", Planted("logit_width", "rounded<E>(sum)")),
    "a sum of exponentials of corrected scores": (
        "softmax",
        Planted("softmax_by_choice", "C::SOFTMAX && s == 0"),
    ),
    "a maximum of one lane": ("softmax", Planted("highest_logit", "mine[0]")),
}


# Every time: the first three.
@pytest.mark.parametrize("name", slow_but(CORRECTION_FAULTS, *list(CORRECTION_FAULTS)[:3]))
def test_a_fault_of_corrections_is_reported(builder: Builder, name: str) -> None:
    scoring, planted = CORRECTION_FAULTS[name]
    with pytest.raises((AssertionError, KernelFault)):
        check_correction(builder, scoring, experts=100, normalised=False, planted=planted)


# Name: True if experts of other groups count as 0 (else they are left out), None without a correction; fault.
GROUP_FAULTS = {
    "the smallest for the second largest": (
        False,
        Planted("second_of_group", "fminf(second, fminf(best, value))"),
    ),
    "the largest alone": (False, Planted("group_score", "best")),
    "two largest without a correction": (None, Planted("group_score", "best + second")),
    "the first group's logits for all": (False, Planted("group_logits", "at")),
    "a group too many kept": (False, Planted("groups_kept", "before <= C::KEPT")),
    "groups that take turns": (False, Planted("group_of_expert", "expert % C::GROUPS")),
    "scores read before they are there": (False, Planted("group_scores_there")),
    "experts left out that count as 0": (True, Planted("dropped_scores", "taken |= 1u << i;")),
    "experts that count as 0 and are to be left out": (False, Planted("dropped_scores", "mine[i] = 0.f;")),
}


# Every time: the first three.
@pytest.mark.parametrize("name", slow_but(GROUP_FAULTS, *list(GROUP_FAULTS)[:3]))
def test_a_fault_of_groups_is_reported(builder: Builder, name: str) -> None:
    zeroed, planted = GROUP_FAULTS[name]
    corrected = {"experts": 128, "rows": 8, "groups": (4, 2, zeroed), "shift": -4.0}
    check = check_best_of_groups if zeroed is None else partial(check_correction, **corrected)
    with pytest.raises((AssertionError, KernelFault)):
        check(builder, planted=planted)


CHOICE_FAULTS = {
    "the highest of equal numbers": Planted(
        "lowest_number", "static_cast<int>(warp_max(key == most ? static_cast<u32>(at) : 0u))"
    ),
    "-0 before 0": Planted("negative_zero", "logits[lane + 32 * i]"),
    "weights that are not normalised": Planted("chosen_weight", "kept * scale"),
    "weights without their factor": Planted("chosen_weight", "(C::NORMALISED ? kept / sum : kept)"),
    "an expert that is taken twice": Planted("taken_bit", "0u"),
    "other blocks' logits not read": Planted("own_logits", "continue;"),
}


# Every time: the first three.
@pytest.mark.parametrize("name", slow_but(CHOICE_FAULTS, *list(CHOICE_FAULTS)[:3]))
def test_a_fault_of_choices_is_reported(builder: Builder, name: str) -> None:
    with pytest.raises((AssertionError, KernelFault)):
        check_equal_logits(builder, CHOICE_FAULTS[name])
