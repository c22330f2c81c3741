"""Finds faults of one module by comparing the stored values with specific other explanations.

docs/verify.md explains the statistic, a log-likelihood ratio, and how its chance is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight
from marlinq.formats import Layout, ModuleSpec
from marlinq.operations.verify.statistics.exchanged_codes import Exchanges, find_exchanges, word_tile
from marlinq.operations.verify.statistics.finding import (
    FAILURE,
    MOST_SAY,
    WARNING,
    RunSize,
    SuspectPlace,
    agreed,
)
from marlinq.operations.verify.statistics.groups import FAR, find_odd_groups
from marlinq.operations.verify.statistics.kept_codes import KeptCodes
from marlinq.operations.verify.statistics.noise import Noise, distance, log_density, measure_noise
from marlinq.operations.verify.statistics.tails import (
    LARGEST_OF_TAIL,
    Tail,
    at_least,
    log_expected,
)

MANY = 6

_MOST_SUSPECTS = 64
_ROWS = 512
_FACTORS = (0.8, 1.25)
"""Factors on scales that test whether they belong to another weight: such scales fit many groups better with
one of these factors, and no quantiser's own scales do."""
_CODE_FLOOR = math.log(2.0)
"""Logarithm of the ratio of a code's distance to the usual distance at which the fitted tail begins."""
_LEAST_CODE_SPREAD = 0.12
"""Least spread of that tail: the frequency of errors then falls with the 8th power of their size, as in the
noise model."""
_SAMPLED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Evidence:
    """The findings in one module.

    Attributes:
        findings: failures first, then by falling evidence.
        words, groups: number of judged words and groups.
        largest: largest log-likelihood ratio of an exchange of two codes.
        spread: spread of the tail fitted to the control pairs; 1 or less agrees with the noise model.
        odd_groups: number of groups whose scale or zero point stands out, before other explanations are
            tried.
        values: number of floating-point weights that were judged one by one.
        rounded: whether the weights were rounded to nearest; False only for floating-point modules.
    """

    findings: tuple[SuspectPlace, ...]
    words: int
    groups: int
    largest: float
    spread: float
    odd_groups: int
    values: int = 0
    rounded: bool = True


def find_faults(
    weight: Tensor,
    q: QuantizedWeight,
    layout: Layout,
    spec: ModuleSpec,
    stored: Mapping[str, Tensor],
    run: RunSize,
) -> Evidence:
    """Judges one module of integer weights, or of floating-point ones.

    Args:
        weight: original weight, float32 [N, K].
        q: stored weight with finite scales, on the device of ``weight``.
        layout: layout that it is stored in; codes of one word can have been exchanged.
        spec: shape and scheme of the module, from config and shapes.
        stored: tensors of the module by suffix, on the CPU.
        run: sizes of everything that is judged in this run.
    """
    w = weight.t()
    tile = None if layout.sparsity else word_tile(layout, q.element, q.in_features, q.out_features)
    noise = measure_noise(w, q, 1 if tile is None else tile.rows)
    findings = list(_whole_module(w, q, _other_explanations(q, layout, spec, stored), noise, run))
    odd, odd_groups = find_odd_groups(w, q, noise, run)
    findings += odd
    if layout.sparsity is None:
        exchanges = find_exchanges(q, layout, noise, most=_MOST_SUSPECTS)
    else:
        exchanges = _exchanges_of_kept_codes(w, q, layout)
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
        # Only without other findings, which also move codes far from their weights.
        findings += _codes(q, noise, run)
    findings.sort(key=lambda finding: (not finding.fails, -finding.evidence))
    return Evidence(tuple(findings), words, q.scales.numel(), largest, spread, odd_groups)


def _exchanges_of_kept_codes(w: Tensor, q: QuantizedWeight, layout: Layout) -> Exchanges | None:
    """The exchanges in a sparse layout's words, judged by the noise of kept codes alone: that of pruned
    weights, which are far from their zeros, would hide them."""
    kept = KeptCodes.of(w, q)
    tile = word_tile(layout, q.element, kept.q.in_features, kept.q.out_features)
    noise = measure_noise(kept.w, kept.q, 1 if tile is None else tile.rows)
    return find_exchanges(kept.q, layout, noise, most=_MOST_SUSPECTS, channels=kept.channels)


def _codes(q: QuantizedWeight, noise: Noise, run: RunSize) -> Iterator[SuspectPlace]:
    """Single codes whose distance, in units of the usual distance, stands out from their module's others.

    A code is judged by the codes that are nearer to their weights, so that several wrong codes don't hide
    each other; all codes beyond the first that stands out stand out too. A code fails if it is also FAR times
    as far off as the farthest code that does not stand out.
    """
    sizes = torch.empty(q.codes.shape, device=noise.r.device)
    for start in range(0, q.in_features, _ROWS):
        rows = slice(start, start + _ROWS)
        sizes[rows] = (noise.r[rows].abs() / noise.sigma(rows)).log_()
    count = min(_MOST_SUSPECTS + LARGEST_OF_TAIL + 1, sizes.numel())
    values, places = sizes.flatten().topk(count)
    large = int((values > _CODE_FLOOR).sum())
    for odd in range(min(_MOST_SUSPECTS, large), 0, -1):
        tail = Tail.fit(
            values[odd:large], sizes.numel() - odd, floor=_CODE_FLOOR, least_spread=_LEAST_CODE_SPREAD
        )
        if _exp(log_expected(tail.log_chance(values[odd - 1 : odd].double()), run.weights))[0] < WARNING:
            break
    else:
        return
    expected = _exp(log_expected(tail.log_chance(values[:odd].double()), run.weights))
    usual = float(values[odd]) if odd < count else -math.inf
    for size, place, chance in zip(values.double(), places.tolist(), expected, strict=False):
        k, n = divmod(place, q.out_features)
        steps = abs(float(noise.r[k, n]))
        what = f"the code of input channel {k} of output channel {n} is {steps:.1f} steps off"
        fails = chance < FAILURE and float(size) > usual + math.log(FAR)
        yield SuspectPlace(what, -float(log_density(size.exp(), torch.ones(()))), chance, fails)


def _words(exchanges: Exchanges, run: RunSize, weights: int) -> Iterator[SuspectPlace]:
    tests = run.weights * exchanges.words / weights
    suspects = []
    for suspect in exchanges.suspects:
        expected = _expected(exchanges, suspect.evidence, tests)
        if expected >= WARNING:
            break  # they come by falling evidence
        what = f"the word that holds input channel {suspect.k} of output channel {suspect.n}: {suspect.what}"
        suspects.append((suspect, SuspectPlace(what, suspect.evidence, expected, fails=False)))
    yield from (finding for _, finding in suspects)
    apart = min(len({suspect.k for suspect, _ in suspects}), len({suspect.n for suspect, _ in suspects}))
    if apart >= MANY:
        count = str(len(suspects)) if len(suspects) < _MOST_SUSPECTS else f"{_MOST_SUSPECTS} or more"
        evidence = sum(suspect.evidence for suspect, _ in suspects)
        what = f"{count} words in different input and output channels look exchanged"
        # If a run had one suspect on average (a hundred times what WARNING allows), MANY at once would have
        # about this Poisson probability.
        yield SuspectPlace(what, evidence, 1 / math.factorial(apart), fails=True)
    for what, where, evidence in exchanges.sums:
        yield from agreed(f"{where}: {what}", evidence, run.weights * exchanges.alternatives)


def _expected(exchanges: Exchanges, evidence: float, tests: float) -> float:
    value = torch.tensor([evidence], dtype=torch.float64)
    chance = at_least(exchanges.tail.log_chance(value), value, exchanges.alternatives)
    return _exp(log_expected(chance, tests))[0]


def _exp(logarithms: Tensor) -> list[float]:
    """Exponentials of a vector, the largest cut to exp(50)."""
    return [math.exp(min(value, 50.0)) for value in logarithms.tolist()]


def _whole_module(
    w: Tensor,
    q: QuantizedWeight,
    explanations: Iterable[tuple[str, Tensor, Tensor]],
    noise: Noise,
    run: RunSize,
) -> Iterator[SuspectPlace]:
    """Faults of a whole tensor, judged on a sample of output channels."""
    step = max(1, q.in_features * q.out_features // _SAMPLED_ELEMENTS)
    columns = torch.arange(0, q.out_features, step, device=w.device)
    groups = q.g_idx.long()
    part, codes = w[:, columns], q.codes[:, columns].float()
    base = log_density(noise.r[:, columns], noise.channel)
    kept = _kept(q, columns)
    for what, scales, zeros in explanations:
        s, z = scales[:, columns].float()[groups], zeros[:, columns].float()[groups]
        gain = log_density(distance(part, codes, s, z, q.element.codes - 1), noise.channel).sub_(base)
        gain = gain if kept is None else gain.mul_(kept)
        by_group = torch.zeros((q.groups, len(columns)), device=w.device).index_add_(0, groups, gain)
        evidence = float(by_group.nan_to_num_(-MOST_SAY).clamp_(max=MOST_SAY).sum())
        yield from agreed(what, evidence, run.weights)


def _other_scales(w: Tensor, q: QuantizedWeight, noise: Noise, run: RunSize) -> Iterator[SuspectPlace]:
    """Scales that belong to another weight: in many groups, they fit better after one of the factors.

    A group's evidence is the likelihood ratio of a mixture: the stored scale or one of the factors times it,
    all equally probable. Its expectation over undamaged groups is 1, like that of each part. Weights too
    small for any scale of the dtype have its smallest one, although a smaller one would fit better.
    """
    step = max(1, q.in_features * q.out_features // _SAMPLED_ELEMENTS)
    columns = torch.arange(0, q.out_features, step, device=w.device)
    groups = q.g_idx.long()
    part, codes = w[:, columns], q.codes[:, columns].float()
    base = log_density(noise.r[:, columns], noise.channel)
    zeros = q.zeros[:, columns].float()[groups]
    gains = [torch.zeros((q.groups, len(columns)), device=w.device)]
    kept = _kept(q, columns)
    for factor in _FACTORS:
        scales = factor * q.scales[:, columns].float()[groups]
        r = distance(part, codes, scales, zeros, q.element.codes - 1)
        gain = log_density(r, noise.channel).sub_(base)
        gain = gain if kept is None else gain.mul_(kept)
        gains.append(torch.zeros_like(gains[0]).index_add_(0, groups, gain))
    mixed = torch.stack(gains).logsumexp(dim=0).sub_(math.log(len(gains)))
    mixed[_at_floor(part, q, columns)] = 0.0
    evidence = float(mixed.nan_to_num_(-MOST_SAY).clamp_(max=MOST_SAY).sum())
    yield from agreed("scales are those of other weights", evidence, run.weights)


def _at_floor(w: Tensor, q: QuantizedWeight, columns: Tensor) -> Tensor:
    """Mask [G, outputs] of groups of integers whose weights, [K, outputs], need a smaller scale than the
    smallest normal one of the dtype, which they have."""
    least = torch.finfo(q.scales.dtype).tiny
    groups = q.g_idx.long().unsqueeze(1).expand(w.shape)
    high, low = (torch.zeros((q.groups, len(columns)), device=w.device) for _ in range(2))
    high.scatter_reduce_(0, groups, w, "amax")
    low.scatter_reduce_(0, groups, w, "amin")
    reach = high - low if q.scheme.stores_zeros else 2 * torch.maximum(high, -low)
    return (reach <= least * (q.element.codes - 1)) & (q.scales[:, columns].abs() == least)


def _kept(q: QuantizedWeight, columns: Tensor) -> Tensor | None:
    """Mask of the codes that tell something about scales; None for all. Pruned weights don't: every coarser
    grid brings them nearer to zero."""
    return None if q.sparsity is None else q.used()[:, columns]


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


def _channels(w: Tensor, q: QuantizedWeight, noise: Noise, run: RunSize) -> Iterator[SuspectPlace]:
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
        ratio = log_density(r, noise.channel[k]) - log_density(noise.r[k], noise.channel[k])
        return ratio.clamp_(max=MOST_SAY).sum(dim=-1)

    for k in (other < mine)[:, 0].nonzero()[:, 0].tolist():
        g = int(group[k])
        evidence = float(gain(k, g))
        if evidence <= 0:
            continue
        # If the whole group fits the other group's scales better, its scale is wrong and not its g_idx.
        peers = (own == own[k]).nonzero()[:, 0]
        evidence -= max(0.0, float(gain(peers, g).median()))
        what = f"input channel {k} fits group {g}, g_idx says {int(own[k])}"
        yield from agreed(what, evidence, run.weights)
