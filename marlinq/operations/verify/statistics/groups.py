"""Finds scales and zero points that do not fit the codes and weights of their group.

A group's oddness is measured by three statistics. The first is |ln b|, where b is the factor on its scale
that fits codes to weights best. The second is ln b in standard errors: noise of spread sigma moves ln b by 1
/ sqrt(sum of (level / sigma) ** 2), and ln b minus the median over the group's outputs is divided by that,
with each input channel weighted by its noise; it detects factors of 1.4. The third is |mean of r|, which a
zero point that is wrong by one moves by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight
from marlinq.operations.verify.statistics.finding import FAILURE, MOST_SAY, RunSize, SuspectPlace, agreed
from marlinq.operations.verify.statistics.noise import Noise, distance, group_rows, log_density
from marlinq.operations.verify.statistics.tails import at_least, log_expected, tail_of_others

FAR = 3.0
"""Ratio of |ln b| to the largest one of the group's unsuspected outputs above which the check fails."""

SUSPICION = 1e-5
"""Expected number below which a group is suspected. It is far below WARNING, because the tails of |ln b| and
of the mean of r are only roughly exponential, and fitted to few outputs."""

_TAIL_SHARE = 0.05
_LEAST_SPREAD = 0.02
_LEAST_LEVELS = 1e-6
"""least sum of squared levels, which would be 0 in a group of zeros"""
_LEAST_ERRORS = 0.37
"""Least spread of the tail in standard errors: that of a normal distribution's tail beyond two of them."""
_FARTHEST = 3.0
_LN_OF_SCALES = math.log(100)
"""A best scale is one of about a hundred that can be told apart."""
_STEPS = ((1, "low"), (-1, "high"))


@dataclass(frozen=True, eq=False)
class _GroupOddness:
    """Oddness of the scales and zero points of all groups, [G, N] each.

    Attributes:
        stretch: |ln b|.
        shift: |mean of r|.
        stretch_chance: ln of the probability of |ln b|, or of ln b in standard errors if that is smaller.
        shift_chance: ln of the probability of ``shift``.
    """

    stretch: Tensor
    shift: Tensor
    stretch_chance: Tensor
    shift_chance: Tensor


@dataclass(frozen=True, eq=False)
class _Group:
    """One group of all outputs: weights and codes float32 [g, N], sigma [g, 1], the others [N]."""

    number: int
    w: Tensor
    codes: Tensor
    sigma: Tensor
    base: Tensor
    scales: Tensor
    zeros: Tensor
    largest: int


def find_odd_groups(
    w: Tensor, q: QuantizedWeight, noise: Noise, run: RunSize
) -> tuple[list[SuspectPlace], int]:
    """Finds flipped bits of a scale's sign or exponent, zero points that are wrong by one, and whole rows and
    outputs of such zero points; and counts the groups that stand out."""
    odd = _oddness(w, q, noise)
    stores_zeros = q.scheme.stores_zeros
    standing_out = 0
    findings: list[SuspectPlace] = []
    by_output = {step: torch.zeros(q.out_features, device=w.device) for step in (1, -1)}
    for group, rows in group_rows(q):
        sigma = noise.channel[rows]
        base = log_density(noise.r[rows], sigma).sum(dim=0)
        codes = q.codes[rows].float()
        scales, zeros = q.scales[group], q.zeros[group].float()
        for step, word in _STEPS if stores_zeros else ():
            r = distance(w[rows], codes, scales.float(), zeros + step, q.element.codes - 1)
            gain = log_density(r, sigma).sum(dim=0).sub_(base).clamp_(max=MOST_SAY)
            by_output[step] += gain
            what = f"group {group}: its zero points are one too {word}"
            findings += agreed(what, float(gain.sum()), run.groups)
        chance = odd.stretch_chance[group]
        if stores_zeros:
            chance = torch.minimum(chance, odd.shift_chance[group])
        suspects = (log_expected(chance, run.groups) < math.log(SUSPICION)).nonzero()[:, 0]
        standing_out += len(suspects)
        if len(suspects):
            place = _Group(group, w[rows], codes, sigma, base, scales, zeros, q.element.codes - 1)
            findings += _odd_groups(place, suspects, odd, stores_zeros, run)
    for step, word in _STEPS:
        for n in (by_output[step] > 0).nonzero()[:, 0].tolist() if stores_zeros else ():
            what = f"output channel {n}: its zero points are one too {word}"
            findings += agreed(what, float(by_output[step][n]), run.groups)
    return findings, standing_out


def _odd_groups(
    group: _Group, suspects: Tensor, odd: _GroupOddness, stores_zeros: bool, run: RunSize
) -> Iterator[SuspectPlace]:
    """The suspects that another scale, or one step of the zero point, explains: it makes them no odder than
    the oddest unsuspected output of the group."""
    w, codes, base = group.w[:, suspects], group.codes[:, suspects], group.base[suspects]
    scales, zeros = group.scales[suspects], group.zeros[suspects]
    others = torch.ones_like(group.base, dtype=torch.bool)
    others[suspects] = False
    lowest = group.base[others].min() if bool(others.any()) else group.base.min()
    largest = {
        False: odd.stretch[group.number].where(others, 0.0).max(),
        True: odd.shift[group.number].where(others, 0.0).max(),
    }
    best: list[SuspectPlace | None] = [None] * len(suspects)
    explanations = [*_scale_bits(scales), _best_scales(w, codes - zeros, scales.float())]
    if stores_zeros:
        for step, word in _STEPS:
            what = [f"its zero point is one too {word}"] * len(suspects)
            explanations.append(_Explanation(what, scales.float(), step))
    for what, s, step, penalty in explanations:
        of_zero = step != 0
        r = distance(w, codes, s, zeros + step, group.largest)
        fit = log_density(r, group.sigma).sum(dim=0)
        now = r.mean(dim=0).abs() if of_zero else _log_slope(w, codes - zeros - step, s).abs()
        chances = odd.shift_chance if of_zero else odd.stretch_chance
        cured = (fit >= lowest) & (now <= largest[of_zero]) & torch.isfinite(s) & (s != 0)
        gain = fit - base - penalty
        chance = at_least(chances[group.number, suspects], gain, len(explanations))
        expected = log_expected(chance, run.groups).clamp(max=50).exp()
        for i in (cured & (expected < SUSPICION)).nonzero()[:, 0].tolist():
            evidence = float(gain[i])
            before = best[i]
            if before is not None and before.evidence >= evidence:
                continue
            n = int(suspects[i])
            certain = not of_zero and float(odd.stretch[group.number, n]) > FAR * float(largest[False])
            place = f"group {group.number} of output channel {n}"
            fails = certain and float(expected[i]) < FAILURE
            best[i] = SuspectPlace(f"{place}: {what[i]}", evidence, float(expected[i]), fails)
    yield from (finding for finding in best if finding is not None)


class _Explanation(NamedTuple):
    """Another scale or zero point for each of some groups.

    Attributes:
        what: description for each group.
        scales: float32 [groups], the other scale.
        step: other zero point minus the stored one.
        penalty: ln of the number of values tried, which the log-likelihood must gain before it counts.
    """

    what: list[str]
    scales: Tensor
    step: int
    penalty: float = 0.0


def _best_scales(w: Tensor, levels: Tensor, scales: Tensor) -> _Explanation:
    """The scales by which ``levels``, [g, N], best fit the weights."""
    slope = _slope(w, levels, scales)
    what = [f"its scale is {1 / b:.2f} times what codes and weights say" for b in slope.tolist()]
    return _Explanation(what, scales * slope, 0, _LN_OF_SCALES)


def _scale_bits(scales: Tensor) -> Iterator[_Explanation]:
    words = scales.view(torch.int32 if scales.dtype == torch.float32 else torch.int16)
    width = 8 * scales.dtype.itemsize
    mantissa = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}[scales.dtype]
    for bit in range(mantissa, width):
        mask = 1 << bit if bit < width - 1 else -(1 << bit)
        flipped = (words ^ mask).view(scales.dtype).float()
        yield _Explanation([f"bit {bit} of its scale is flipped"] * len(scales), flipped, 0)


def _oddness(w: Tensor, q: QuantizedWeight, noise: Noise) -> _GroupOddness:
    stretch = torch.zeros(q.scales.shape, device=w.device)
    errors, shift = torch.zeros_like(stretch), torch.zeros_like(stretch)
    for group, rows in group_rows(q):
        levels = q.codes[rows].float().sub_(q.zeros[group].float())
        scales = q.scales[group].float()
        stretch[group] = _log_slope(w[rows], levels, scales).abs_()
        # Weighted by the noise of each input channel.
        known, levels = w[rows] / noise.channel[rows], levels / noise.channel[rows]
        factors = _log_slope(known, levels, scales)
        # Minus the median, because one dominant input channel stretches all outputs alike; and where all
        # codes are equal, the method's errors stretch the group as a whole.
        errors[group] = (factors - factors.median()).mul_(levels.square().sum(dim=0).sqrt_()).abs_()
        errors[group][(q.codes[rows] == q.codes[rows][:1]).all(dim=0)] = 0.0
        shift[group] = noise.r[rows].mean(dim=0).abs_()
    # Bonferroni: the smaller of two probabilities counts twice.
    by_errors = tail_of_others(errors, share=_TAIL_SHARE, least_spread=_LEAST_ERRORS).add_(math.log(2))
    return _GroupOddness(stretch, shift, torch.minimum(_chance(stretch), by_errors), _chance(shift))


def _slope(w: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """The factor b by which levels, [g, N], times scales, [N], best fit the weights."""
    slope = (w * levels).sum(dim=0).div_(scales).div_(levels.square().sum(dim=0).clamp_(min=_LEAST_LEVELS))
    # A scale of the wrong sign counts as the farthest.
    return slope.nan_to_num_(0).clamp_(math.exp(-_FARTHEST), math.exp(_FARTHEST))


def _log_slope(w: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """ln b of :func:`_slope`; 0 where all levels are."""
    return torch.where((levels == 0).all(dim=0), 0.0, _slope(w, levels, scales).log_())


def _chance(values: Tensor) -> Tensor:
    """ln of the probability of each value [G, N], from the same group's other outputs, which share its input
    channels and hence a channel that may dominate."""
    return tail_of_others(values, share=_TAIL_SHARE, least_spread=_LEAST_SPREAD)
