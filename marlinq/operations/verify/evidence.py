"""Is this still the checkpoint that a quantiser wrote? Statistics of codes against the original weights.

GPTQ moves weights on purpose, so a code may lie a few steps from its weight's place on the grid, and a
scale may be shrunken or grown. What it never does is to make *another, specific* explanation fit much
better. So each test compares two explanations of what is stored: the values as they are, and the values with
one fault undone (two codes of a word exchanged, a bit of a scale flipped back, a zero point one higher). Its
statistic is the log-likelihood ratio L of the second over the first.

Noise (:mod:`~marlinq.operations.verify.noise`). r[k, n] is the distance between a weight's place on its
(clipped) grid and its code, in code units. Its spread depends on the input channel (how much GPTQ carried over
to it) and, in outputs that are much larger than others, on the place. So sigma[k, n] is the spread of channel k
times that of n's neighbourhood, both measured robustly, and r / sigma is taken to follow a Student t
distribution with 8 degrees of freedom.

Chance. If the noise is as modelled, E[exp L] <= 1 while nothing is wrong, so P(L > x) <= exp(-x) (Markov). GPTQ's
noise is not always as modelled, so no threshold rests on that alone. The chance of a statistic is the larger of
the model's and of a tail fitted to the module's own values (:mod:`~marlinq.operations.verify.tails`). What is
reported is its *expectation*: the chance times the number of such tests in the whole run, which is how many
findings as strong as this one an undamaged checkpoint of this size has on average.

Words. The tail is fitted to control pairs, which no fault exchanges (:mod:`~marlinq.operations.verify.words`). L
grows with the logarithm of an error, so where errors follow a power law L has an exponential tail, and the fit
is Hill's estimator; errors with lighter tails make it cautious. A word is suspect below an expectation of
:data:`WARNING` = 0.01, so a run over an undamaged checkpoint has a suspect with a probability below 1 %, whatever
its size. A suspect is a warning. Only :data:`MANY` suspects in different input and output channels of a module
fail: if suspects came up by chance in every single run, independent ones would do that in one of 1e4.

Scales. Where one channel outweighs all others of its group, GPTQ fits the scale to that one, and L prefers a
scale twice off for the others. So a scale must also stand out: with b the best factor between codes and weights,
|ln b| must have an expectation below WARNING in the tail fitted to the other outputs of its group, and the
corrected group must look like the others there, in b and in likelihood. It fails at an expectation below
:data:`FAILURE` with |ln b| :data:`FAR` times that of any group not suspected; else it is a warning. Single zero
points are judged alike, by the mean of r, and only where the scheme stores them; they are warnings.

Rows, columns, whole tensors. A fault of many words or groups is judged by a sum of L over them in which none
counts for more than 4. E[exp] of such a sum is still at most 1, so P(sum > T) <= exp(-T), and it takes T / 4 that
agree, more than object: no unlucky word, group or channel can do that. It fails at an expectation below FAILURE.

False alarms in a run: warnings below 2 * WARNING (words; scales and zero points), failed checks by sums below a few
times FAILURE, and by many suspects as above. How far that holds was measured on layers of real models and on
harder ones (``lab/reliability/false_alarms.py``; docs/benchmarks.md).

What can't be told this way: the bits of a scale's mantissa (a quantiser is free to choose a scale that is a
quarter larger), and exchanged codes that differ little. Only the manifest's hashes see those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight
from marlinq.formats import Layout, ModuleSpec
from marlinq.operations.verify.noise import Noise, distance, group_rows, log_density, measure_noise
from marlinq.operations.verify.tails import at_least, log_expected, row_tails
from marlinq.operations.verify.words import MOST_SAY, Exchanges, find_exchanges

WARNING = 1e-2
FAILURE = 1e-6
MANY = 6
FAR = 3.0

_MOST_SUSPECTS = 64
_TAIL_SHARE = 0.05
_LEAST_STRETCH = 0.02
_LEAST_SHIFT = 0.02
_FARTHEST = 3.0
# A corrected group must be one like the others: no odder than one in so many.
_ORDINARY = math.log(1e-3)
_LOWEST_FIT = 0.01
_SAMPLED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class RunSize:
    """How much is tested in a run; expectations count over it."""

    weights: int
    groups: int

    @classmethod
    def of(cls, modules: Iterable[ModuleSpec]) -> RunSize:
        """All quantised modules of a checkpoint."""
        listed = list(modules)
        weights = sum(spec.in_features * spec.out_features for spec in listed)
        return cls(weights, sum(spec.groups * spec.out_features for spec in listed))


@dataclass(frozen=True)
class Finding:
    """A place where another explanation fits better.

    Attributes:
        what: the place and the explanation.
        evidence: the log-likelihood ratio, or a limited sum of them.
        expected: how many as strong as this an undamaged checkpoint of the run's size has on average.
        fails: False for a suspicion about one word or group.
    """

    what: str
    evidence: float
    expected: float
    fails: bool


@dataclass(frozen=True)
class Evidence:
    """What was found in one module.

    Attributes:
        findings: failures first, then by falling evidence.
        words, groups: how many were judged.
        largest: the largest log-likelihood ratio of any exchange within a word.
        spread: of the tail fitted to the control pairs; 1 or below is as the noise model says.
        odd_groups: how many groups' scales or zero points stand out, before it is asked what would put them right.
    """

    findings: tuple[Finding, ...]
    words: int
    groups: int
    largest: float
    spread: float
    odd_groups: int


def find_faults(
    weight: Tensor,
    q: QuantizedWeight,
    layout: Layout,
    spec: ModuleSpec,
    stored: Mapping[str, Tensor],
    run: RunSize,
) -> Evidence:
    """Judge one module.

    Args:
        weight: the original, float32 [N, K].
        q: what is stored, its scales finite, on the device of ``weight``.
        layout: the layout it is stored in; its words say which codes can have been exchanged.
        spec: what config and shapes say about the module.
        stored: the module's tensors by suffix, on the CPU.
        run: all that is judged together with this module.
    """
    w = weight.t()
    noise = measure_noise(w, q)
    findings = list(_whole_module(w, q, _other_explanations(q, layout, spec, stored), noise, run))
    found, odd_groups = _groups(w, q, noise, run)
    findings += found
    exchanges = find_exchanges(q, layout, noise, most=_MOST_SUSPECTS)
    words, largest, spread = 0, 0.0, 1.0
    if exchanges is not None:
        findings += _words(exchanges, run, weight.numel())
        words, spread = exchanges.words, exchanges.tail.spread
        if exchanges.suspects:
            largest = exchanges.suspects[0].evidence
    if not q.has_trivial_g_idx:
        findings += _channels(w, q, noise, run)
    findings.sort(key=lambda finding: (not finding.fails, -finding.evidence))
    return Evidence(tuple(findings), words, q.scales.numel(), largest, spread, odd_groups)


def _words(exchanges: Exchanges, run: RunSize, weights: int) -> Iterator[Finding]:
    tests = run.weights * exchanges.words / weights
    suspects = []
    for suspect in exchanges.suspects:
        expected = _expected(exchanges, suspect.evidence, tests)
        if expected < WARNING:
            what = (
                f"the word that holds input channel {suspect.k} of output channel {suspect.n}: {suspect.what}"
            )
            suspects.append((suspect, Finding(what, suspect.evidence, expected, fails=False)))
    yield from (finding for _, finding in suspects)
    apart = min(len({suspect.k for suspect, _ in suspects}), len({suspect.n for suspect, _ in suspects}))
    if apart >= MANY:
        count = str(len(suspects)) if len(suspects) < _MOST_SUSPECTS else f"{_MOST_SUSPECTS} or more"
        evidence = sum(suspect.evidence for suspect, _ in suspects)
        what = f"{count} words in different input and output channels look exchanged"
        # At one suspect a run, which is a hundred times what is allowed, MANY at once are a Poisson tail.
        yield Finding(what, evidence, 1 / math.factorial(apart), fails=True)
    for what, where, evidence in exchanges.sums:
        yield from _agreed(f"{where}: {what}", evidence, run.weights * exchanges.alternatives)


def _expected(exchanges: Exchanges, evidence: float, tests: float) -> float:
    value = torch.tensor([evidence], dtype=torch.float64)
    chance = at_least(exchanges.tail.log_chance(value), value, exchanges.alternatives)
    return math.exp(min(float(log_expected(chance, tests)), 50.0))


def _agreed(what: str, evidence: float, tests: float) -> Iterator[Finding]:
    """A failure, where a limited sum of log-likelihood ratios has an expectation below FAILURE."""
    expected = tests * math.exp(-min(max(evidence, 0.0), 700.0))
    if expected < FAILURE:
        yield Finding(what, evidence, expected, fails=True)


def _whole_module(
    w: Tensor,
    q: QuantizedWeight,
    explanations: Iterable[tuple[str, Tensor, Tensor]],
    noise: Noise,
    run: RunSize,
) -> Iterator[Finding]:
    """Faults of a whole tensor, judged on as many output channels as a sample needs."""
    step = max(1, q.in_features * q.out_features // _SAMPLED_ELEMENTS)
    columns = torch.arange(0, q.out_features, step, device=w.device)
    groups = q.g_idx.long()
    part, codes = w[:, columns], q.codes[:, columns].float()
    base = log_density(noise.r[:, columns], noise.channel)
    for what, scales, zeros in explanations:
        s, z = scales[:, columns].float()[groups], zeros[:, columns].float()[groups]
        gain = log_density(distance(part, codes, s, z, q.element.codes - 1), noise.channel).sub_(base)
        by_group = torch.zeros((q.groups, len(columns)), device=w.device).index_add_(0, groups, gain)
        evidence = float(by_group.nan_to_num_(-MOST_SAY).clamp_(max=MOST_SAY).sum())
        yield from _agreed(what, evidence, run.weights)


def _other_explanations(
    q: QuantizedWeight, layout: Layout, spec: ModuleSpec, stored: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    scales = stored[layout.scale_key]
    rows, columns = scales.shape
    if rows > 1 and columns > 1:
        restored = scales.reshape(columns, rows).t().contiguous()
        other = layout.unpack({**stored, layout.scale_key: restored}, spec)
        yield "scales are stored transposed", other.scales.to(q.scales.device), q.zeros
    for axis, name in ((0, "group"), (1, "output channel")):
        if q.scales.shape[axis] > 2:
            for step, word in ((1, "early"), (-1, "late")):
                what = f"scales are stored one {name} too {word}"
                yield what, q.scales.roll(step, axis), q.zeros
    top = (1 << q.element.codes - 1) - 1
    for step, word in ((1, "low"), (-1, "high")):
        shifted = (q.zeros.short() + step).clamp_(0, q.element.codes - 1)
        yield f"zero points are one too {word}", q.scales, shifted


@dataclass(frozen=True, eq=False)
class _GroupOddness:
    """How far the scales and zero points of groups lie from what codes and weights say, [G, N] each.

    ``stretch`` is |ln b|, ``shift`` the mean of r's size; the others are ln of the chance of each.
    """

    stretch: Tensor
    shift: Tensor
    stretch_chance: Tensor
    shift_chance: Tensor


def _groups(w: Tensor, q: QuantizedWeight, noise: Noise, run: RunSize) -> tuple[list[Finding], int]:
    """One bit of a scale's sign or exponent flipped; one zero point off by one; and whole rows and outputs
    of zero points. Also how many groups stand out."""
    odd = _oddness(w, q, noise)
    stores_zeros = q.scheme.stores_zeros
    standing_out = 0
    usual = odd.stretch[log_expected(odd.stretch_chance, run.groups) >= math.log(WARNING)]
    far = FAR * float(usual.max()) if len(usual) else math.inf
    found: list[Finding] = []
    by_output = {step: torch.zeros(q.out_features, device=w.device) for step in (1, -1)}
    for group, rows in group_rows(q):
        sigma = noise.channel[rows]
        base = log_density(noise.r[rows], sigma).sum(dim=0)
        codes = q.codes[rows].float()
        scales, zeros = q.scales[group], q.zeros[group].float()
        for step, word in ((1, "low"), (-1, "high")) if stores_zeros else ():
            r = distance(w[rows], codes, scales.float(), zeros + step, q.element.codes - 1)
            gain = log_density(r, sigma).sum(dim=0).sub_(base).clamp_(max=MOST_SAY)
            by_output[step] += gain
            what = f"group {group}: its zero points are one too {word}"
            found += _agreed(what, float(gain.sum()), run.groups)
        chance = odd.stretch_chance[group]
        if stores_zeros:
            chance = torch.minimum(chance, odd.shift_chance[group])
        suspects = (log_expected(chance, run.groups) < math.log(WARNING)).nonzero()[:, 0]
        standing_out += len(suspects)
        if len(suspects):
            place = _Group(group, w[rows], codes, sigma, base, scales, zeros, q.element.codes - 1)
            found += _odd_groups(place, suspects, odd, stores_zeros, far, run)
    for step, word in ((1, "low"), (-1, "high")):
        for n in (by_output[step] > 0).nonzero()[:, 0].tolist() if stores_zeros else ():
            what = f"output channel {n}: its zero points are one too {word}"
            found += _agreed(what, float(by_output[step][n]), run.groups)
    return found, standing_out


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


def _odd_groups(
    group: _Group, suspects: Tensor, odd: _GroupOddness, stores_zeros: bool, far: float, run: RunSize
) -> Iterator[Finding]:
    """Those of the suspects that one bit of the scale, or one step of the zero point, puts right."""
    w, codes, base = group.w[:, suspects], group.codes[:, suspects], group.base[suspects]
    scales, zeros = group.scales[suspects], group.zeros[suspects]
    lowest = group.base.quantile(_LOWEST_FIT)
    stretch, shift = odd.stretch[group.number].clone(), odd.shift[group.number].clone()
    best: list[Finding | None] = [None] * len(suspects)
    explanations = list(_scale_bits(scales))
    if stores_zeros:
        explanations += [(f"its zero point is one too {word}", scales.float(), step) for step, word in _STEPS]
    for name, s, step in explanations:
        of_zero = step != 0
        r = distance(w, codes, s, zeros + step, group.largest)
        fit = log_density(r, group.sigma).sum(dim=0)
        stretch[suspects] = _stretch(w, codes - zeros - step, s)
        shift[suspects] = r.mean(dim=0).abs()
        chances = odd.shift_chance if of_zero else odd.stretch_chance
        now = _shift_chance(shift) if of_zero else _stretch_chance(stretch)
        cured = (fit >= lowest) & (now[suspects] > _ORDINARY) & torch.isfinite(s) & (s != 0)
        gain = fit - base
        chance = at_least(chances[group.number, suspects], gain, len(explanations))
        expected = log_expected(chance, run.groups).clamp(max=50).exp()
        for i in (cured & (expected < WARNING)).nonzero()[:, 0].tolist():
            evidence = float(gain[i])
            before = best[i]
            if before is not None and before.evidence >= evidence:
                continue
            n = int(suspects[i])
            certain = not of_zero and float(odd.stretch[group.number, n]) > far
            what = f"group {group.number} of output channel {n}: {name}"
            fails = certain and float(expected[i]) < FAILURE
            best[i] = Finding(what, evidence, float(expected[i]), fails)
    yield from (finding for finding in best if finding is not None)


_STEPS = ((1, "low"), (-1, "high"))


def _scale_bits(scales: Tensor) -> Iterator[tuple[str, Tensor, int]]:
    words = scales.view(torch.int32 if scales.dtype == torch.float32 else torch.int16)
    width = 8 * scales.dtype.itemsize
    mantissa = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}[scales.dtype]
    for bit in range(mantissa, width):
        mask = 1 << bit if bit < width - 1 else -(1 << bit)
        flipped = (words ^ mask).view(scales.dtype).float()
        yield f"bit {bit} of its scale is flipped", flipped, 0


def _oddness(w: Tensor, q: QuantizedWeight, noise: Noise) -> _GroupOddness:
    stretch = torch.zeros(q.scales.shape, device=w.device)
    shift = torch.zeros_like(stretch)
    for group, rows in group_rows(q):
        levels = q.codes[rows].float().sub_(q.zeros[group].float())
        stretch[group] = _stretch(w[rows], levels, q.scales[group].float())
        shift[group] = noise.r[rows].mean(dim=0).abs_()
    return _GroupOddness(stretch, shift, _stretch_chance(stretch), _shift_chance(shift))


def _stretch(w: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """|ln b| of the factor b by which the levels, [g, N], best fit the weights, in units of the scale, [N]."""
    slope = (w * levels).sum(dim=0).div_(scales).div_(levels.square().sum(dim=0).clamp_(min=1))
    # A scale of the wrong sign is as far off as one can be.
    stretch = slope.nan_to_num_(0).clamp_(math.exp(-_FARTHEST), math.exp(_FARTHEST)).log_().abs_()
    return torch.where((levels == 0).all(dim=0), 0.0, stretch)


def _stretch_chance(stretch: Tensor) -> Tensor:
    rows = row_tails(stretch.reshape(-1, stretch.shape[-1]), share=_TAIL_SHARE, least_spread=_LEAST_STRETCH)
    return rows.reshape(stretch.shape)


def _shift_chance(shift: Tensor) -> Tensor:
    rows = row_tails(shift.reshape(-1, shift.shape[-1]), share=_TAIL_SHARE, least_spread=_LEAST_SHIFT)
    return rows.reshape(shift.shape)


def _channels(w: Tensor, q: QuantizedWeight, noise: Noise, run: RunSize) -> Iterator[Finding]:
    """Input channels whose codes fit another group's scales: an entry of g_idx is wrong."""
    scales, zeros = q.scales.float(), q.zeros.float()
    codes, own = q.codes.float(), q.g_idx.long()
    offset = scales * zeros
    # ||w - (c - z) s||^2 of every channel under every group, expanded into matrix products.
    energy = (codes.square() @ scales.square().t()) - 2 * (codes @ (offset * scales).t())
    energy += offset.square().sum(dim=1) - 2 * ((w * codes) @ scales.t() - w @ offset.t())
    mine = energy.gather(1, own.unsqueeze(1))
    energy.scatter_(1, own.unsqueeze(1), math.inf)
    other, group = energy.min(dim=1, keepdim=True)

    def gain(k: Tensor | int, g: int) -> Tensor:
        r = distance(w[k], codes[k], scales[g], zeros[g], q.element.codes - 1)
        found = log_density(r, noise.channel[k]) - log_density(noise.r[k], noise.channel[k])
        return found.clamp_(max=MOST_SAY).sum(dim=-1)

    for k in (other < mine)[:, 0].nonzero()[:, 0].tolist():
        g = int(group[k])
        evidence = float(gain(k, g))
        if evidence <= 0:
            continue
        # Where the whole group fits the other's scales better, its scale is odd and not g_idx.
        peers = (own == own[k]).nonzero()[:, 0]
        evidence -= max(0.0, float(gain(peers, g).median()))
        what = f"input channel {k} fits group {g}, g_idx says {int(own[k])}"
        yield from _agreed(what, evidence, run.weights)
