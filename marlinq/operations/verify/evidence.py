"""Is this still the checkpoint that a quantiser wrote? Statistics of codes against the original weights.

GPTQ moves weights on purpose, so a code may lie a few steps from its weight's place on the grid, and a scale
may be shrunken or grown. What it never does is to make *another, specific* explanation fit much better. So
each test compares two explanations: what is stored as it is, and with one fault undone (two codes of a word
exchanged, a bit of a scale flipped back, a zero point one higher). Its statistic is the log-likelihood ratio
L of the second over the first.

Noise (``noise.py``). r[k, n] is the distance between a weight's place on its clipped grid and its code, in
code units. Its spread differs between input channels (by how much GPTQ carried over to them) and between
places (outputs with outliers have larger errors throughout). So sigma[k, n] is the spread of channel k times
that of the block of n that k lies in, both measured robustly, and r / sigma is taken to follow a Student t
distribution with 8 degrees of freedom.

Chance and expectation. If the noise is as modelled, E[exp L] <= 1 while nothing is wrong, so P(L > x) <=
exp(-x) (Markov). GPTQ's noise is not always as modelled. So the chance of a single L is the larger of the
model's bound, times the number of alternatives, and of a tail fitted to the module's own values
(``tails.py``). Times the number of such tests in the whole run it is the *expectation*: how many findings as
strong as this one an undamaged checkpoint of this size has on average. It bounds the probability of having
any.

Words (``words.py``). The tail is fitted to control pairs: codes of neighbouring words, which no fault
exchanges. L grows with the logarithm of an error, so errors with a power law give L an exponential tail,
whose slope is Hill's estimator; lighter errors only make it cautious. A word is suspect below an expectation
of WARNING = 0.01: in at most one of a hundred undamaged runs of any size. It is a warning. MANY suspects in
different input and output channels of one module fail. Even if the tail were so wrong that each run had one
suspect, MANY = 6 at once would be the upper tail of a Poisson variable of mean 1, 6e-4.

Scales (``groups.py``). Where one channel outweighs the others of its group, GPTQ fits the scale to that one,
and L prefers a scale twice off for the others. So a scale must also stand out: with b the factor that would
best fit its codes to the weights, |ln b| must have an expectation below 1e-5 in the tail fitted to the
other outputs of its group, and the corrected group must be no odder than the oddest of those. It fails at an
expectation below FAILURE = 1e-6 with |ln b| three times as large as theirs; else it is a warning. Single zero
points are judged likewise, by the mean of r, where the scheme stores any; they are warnings.

Rows, columns, tensors. Faults of many words or groups are judged by sums of L in which none counts for more
than 4. E[exp] of such a sum is at most 1 too, so P(sum > T) <= exp(-T), and T / 4 of them must agree, more
than object. That fails at an expectation below FAILURE: no unlucky word, group or channel can do it. The
bound takes outputs as independent given the inputs, as GPTQ solves them; equal rows of a weight are not.

False alarms of a run, then: a warning about a word with a probability below WARNING, a failure by one of some
ten kinds of sums below FAILURE each. For single groups, whose tail is only roughly exponential, the level is
lower instead, and the other conditions have to hold. ``lab/reliability/false_alarms.py`` measures them.

Single codes. The tail is fitted to the logarithm of |r| / sigma over all codes of the module. A code whose
expectation is below WARNING is a warning. Where GPTQ itself moves many codes by several steps, a single one
as far off does not stand out.

Scales of another weight. For every group, the likelihood of its scale is compared with a mixture: as it is,
or 0.8 or 1.25 times that. The sum over the groups is judged like the other sums.

What can't be told this way: the lower bits of a scale's mantissa, codes that GPTQ could have moved as far,
and exchanged codes that differ little. Only the manifest's hashes see those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight
from marlinq.formats import Layout, ModuleSpec
from marlinq.operations.verify.finding import MOST_SAY, WARNING, Finding, RunSize, agreed
from marlinq.operations.verify.groups import find_odd_groups
from marlinq.operations.verify.noise import Noise, distance, log_density, measure_noise
from marlinq.operations.verify.tails import Tail, at_least, log_expected
from marlinq.operations.verify.words import Exchanges, find_exchanges

MANY = 6

_MOST_SUSPECTS = 64
_ROWS = 512
_FACTORS = (0.8, 1.25)
"""What scales are multiplied by to see whether they belong to another weight: no quantiser is so far off in
many groups of a module, and another weight's scales are."""
_CODE_FLOOR = math.log(2.0)
"""Logarithm of the least distance, in units of the usual one, at which the tail of single codes begins."""
_LEAST_CODE_SPREAD = 0.12
"""Least spread of that tail: an error's size falls with its 8th power there, as in the noise model."""
_SAMPLED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Evidence:
    """What was found in one module.

    Attributes:
        findings: failures first, then by falling evidence.
        words, groups: how many were judged.
        largest: the largest log-likelihood ratio of an exchange.
        spread: of the tail fitted to the control pairs; 1 or below is as the noise model says.
        odd_groups: groups whose scale or zero point stands out, before it is asked what would put it right.
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
    found, odd_groups = find_odd_groups(w, q, noise, run)
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
    findings += _other_scales(w, q, noise, run)
    if not findings:
        # Anything found above moves codes far from their weights too.
        findings += _codes(q, noise, run)
    findings.sort(key=lambda finding: (not finding.fails, -finding.evidence))
    return Evidence(tuple(findings), words, q.scales.numel(), largest, spread, odd_groups)


def _codes(q: QuantizedWeight, noise: Noise, run: RunSize) -> Iterator[Finding]:
    """Single codes whose distance, in units of the usual one, stands out from all others of their module."""
    sizes = torch.empty(q.codes.shape, device=noise.r.device)
    for start in range(0, q.in_features, _ROWS):
        rows = slice(start, start + _ROWS)
        sizes[rows] = (noise.r[rows].abs() / noise.sigma(rows)).log_()
    large = sizes[sizes > _CODE_FLOOR]
    if not len(large):
        return
    tail = Tail.fit(large, sizes.numel(), floor=_CODE_FLOOR, least_spread=_LEAST_CODE_SPREAD)
    values, places = sizes.flatten().topk(min(_MOST_SUSPECTS, sizes.numel()))
    for size, place in zip(values.double(), places.tolist(), strict=True):
        expected = math.exp(min(float(log_expected(tail.log_chance(size), run.weights)), 50.0))
        if expected >= WARNING:
            return
        k, n = divmod(place, q.out_features)
        steps = abs(float(noise.r[k, n]))
        what = f"the code of input channel {k} of output channel {n} is {steps:.1f} steps off"
        yield Finding(what, -float(log_density(size.exp(), torch.ones(()))), expected, fails=False)


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
        yield from agreed(f"{where}: {what}", evidence, run.weights * exchanges.alternatives)


def _expected(exchanges: Exchanges, evidence: float, tests: float) -> float:
    value = torch.tensor([evidence], dtype=torch.float64)
    chance = at_least(exchanges.tail.log_chance(value), value, exchanges.alternatives)
    return math.exp(min(float(log_expected(chance, tests)), 50.0))


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
        yield from agreed(what, evidence, run.weights)


def _other_scales(w: Tensor, q: QuantizedWeight, noise: Noise, run: RunSize) -> Iterator[Finding]:
    """Scales that belong to another weight: in many groups, one of some factors makes them fit better.

    A group's evidence is the likelihood ratio of a mixture: as it is, or by one of the factors, all equally
    probable. Its expectation is 1 like that of its parts.
    """
    step = max(1, q.in_features * q.out_features // _SAMPLED_ELEMENTS)
    columns = torch.arange(0, q.out_features, step, device=w.device)
    groups = q.g_idx.long()
    part, codes = w[:, columns], q.codes[:, columns].float()
    base = log_density(noise.r[:, columns], noise.channel)
    zeros = q.zeros[:, columns].float()[groups]
    gains = [torch.zeros((q.groups, len(columns)), device=w.device)]
    for factor in _FACTORS:
        scales = factor * q.scales[:, columns].float()[groups]
        r = distance(part, codes, scales, zeros, q.element.codes - 1)
        gain = log_density(r, noise.channel).sub_(base)
        gains.append(torch.zeros_like(gains[0]).index_add_(0, groups, gain))
    mixed = torch.stack(gains).logsumexp(dim=0).sub_(math.log(len(gains)))
    evidence = float(mixed.nan_to_num_(-MOST_SAY).clamp_(max=MOST_SAY).sum())
    yield from agreed("scales are those of other weights", evidence, run.weights)


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
    for step, word in ((1, "low"), (-1, "high")):
        shifted = (q.zeros.short() + step).clamp_(0, q.element.codes - 1)
        yield f"zero points are one too {word}", q.scales, shifted


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
        yield from agreed(what, evidence, run.weights)
