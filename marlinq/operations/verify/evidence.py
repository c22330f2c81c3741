"""Is this still the checkpoint that a quantiser wrote? Statistics of codes against the original weights.

GPTQ moves weights on purpose, so a code may lie a few steps from its weight's place on the grid, and a
scale may be shrunken or grown. What it never does is to make *another, specific* explanation fit much
better. So each test compares two explanations of the stored codes: the values as stored, and the values with
one fault undone (two codes of a word exchanged, a bit of a scale flipped back, a zero point one higher).

Model of the noise. In code units the distance r[k, n] between a weight's place on its (clipped) grid and
its code is small, and its spread depends on the input channel k (how much GPTQ carried over to it) and
hardly on n. With sigma[k] measured over the outputs, r / sigma is taken to follow a Student t distribution
with :data:`DEGREES` degrees of freedom: its tails are fatter than what GPTQ leaves behind.

Threshold. The log-likelihood ratio L of the second explanation over the first has E[exp L] <= 1 when the
first is true, so P(L > T) <= exp(-T) (Markov), and with M tests in a run T = ln(M / :data:`FALSE_ALARM`)
keeps the chance of any false alarm below FALSE_ALARM as far as the model holds. How far that is was measured
on undamaged modules. For exchanged codes all layers of a 135M Llama-style model stay below 15, where T is 25.
160 random layers whose input channels differ by factors of 50 in size, and which GPTQ therefore moves most,
reach 17.5; hence :data:`SMALLEST_THRESHOLD` for runs over few weights.

Scales and zero points need a second condition. Where one input channel outweighs all others of its group, a
quantiser fits the scale to that channel alone, and the others' codes end up to twice off (L = 135). That
shows in many outputs of the group, since they share the channel. So a scale must also stand out against
those of the other outputs: the best-fitting factor between codes and weights has to lie so far out in the
tail fitted to the others that its probability, over all groups of the run, is below FALSE_ALARM too; the mean
of r likewise for zero points.

What can't be told this way: the bits of a scale's mantissa (a quantiser is free to choose a scale that is a
quarter larger), and exchanged codes that differ little. Only the manifest's hashes see those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from marlinq.core.scheme import CHANNEL, Scheme, integer_element
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats import Layout, ModuleSpec
from marlinq.formats.packing import pack_last, slots_per_word

DEGREES = 8.0
FALSE_ALARM = 1e-2
SMALLEST_THRESHOLD = 20.0
TESTS_PER_WEIGHT = 4
"""28 pairs in a word of 8 codes, and a little for groups and channels."""

# Rounding alone leaves errors of this spread, in code units; a smaller sigma would be over-confident.
_SMALLEST_SIGMA = 12**-0.5
_BYTE_PARTNERS = ((0, 1), (2, 3), (4, 5), (6, 7))
_CHUNK_ELEMENTS = 1 << 22
_TAIL_SHARE = 0.05
_SMALLEST_SPREAD = 0.02
_FARTHEST = 3.0
_SAMPLED_ELEMENTS = 1 << 20


def threshold(weights: int) -> float:
    """The log-likelihood ratio that counts as a fault in a run over ``weights`` quantised weights."""
    return max(math.log(max(weights, 1) * TESTS_PER_WEIGHT / FALSE_ALARM), SMALLEST_THRESHOLD)


@dataclass(frozen=True)
class Fault:
    """A place where another explanation fits better by ``evidence`` (a log-likelihood ratio)."""

    what: str
    evidence: float


@dataclass(frozen=True, eq=False)
class _Noise:
    """r, float32 [K, N], in code units, and sigma, float32 [K, 1]."""

    r: Tensor
    sigma: Tensor


def find_faults(
    weight: Tensor,
    q: QuantizedWeight,
    layout: Layout,
    spec: ModuleSpec,
    stored: Mapping[str, Tensor],
    limit: float,
) -> list[Fault]:
    """Faults of one module, largest evidence first.

    Args:
        weight: the original, float32 [N, K].
        q: what is stored, its scales finite, on the device of ``weight``.
        layout: the layout it is stored in; its words say which codes can have been exchanged.
        spec: what config and shapes say about the module.
        stored: the module's tensors by suffix, on the CPU.
        limit: see :func:`threshold`.
    """
    w = weight.t()
    noise = _noise(w, q)
    faults = [
        *_whole_module(w, q, _other_explanations(q, layout, spec, stored), noise, limit),
        *_groups(w, q, noise, limit),
        *_words(q, layout, noise, limit),
    ]
    if not q.has_trivial_g_idx:
        faults += _channels(w, q, noise, limit)
    return sorted(faults, key=lambda fault: -fault.evidence)


def _log_density(r: Tensor, sigma: Tensor) -> Tensor:
    """Of the Student t distribution, without the terms that r does not change."""
    return (r / sigma).square_().div_(DEGREES).log1p_().mul_(-(DEGREES + 1) / 2)


def _distance(w: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """r: how far each weight's place on the grid is from its code; beyond the grid's ends is no distance.

    ``scales`` and ``zeros`` broadcast against ``w`` and ``codes``.
    """
    place = w.div(scales).add_(zeros)
    # 0 / 0: a weight of zero lies at the zero point whatever the scale is.
    place = torch.where(place.isnan(), zeros.expand_as(place), place)
    return place.clamp_(0, (1 << bits) - 1).sub_(codes)


def _noise(w: Tensor, q: QuantizedWeight) -> _Noise:
    r = torch.empty(q.codes.shape, device=w.device)
    for group, rows in _group_rows(q):
        scales, zeros = q.scales[group].float(), q.zeros[group].float()
        r[rows] = _distance(w[rows], q.codes[rows].float(), scales, zeros, q.element.bits)
    sigma = torch.empty((q.in_features, 1), device=w.device)
    step = max(1, _CHUNK_ELEMENTS // q.out_features)
    for start in range(0, q.in_features, step):
        part = r[start : start + step].abs()
        # Faults must not widen the noise they are measured by.
        rough = part.median(dim=1, keepdim=True).values.mul_(1.4826).clamp_(min=_SMALLEST_SIGMA)
        part = torch.minimum(part, 4 * rough)
        sigma[start : start + step] = part.square_().mean(dim=1, keepdim=True).sqrt_()
    return _Noise(r, sigma.clamp_(min=_SMALLEST_SIGMA))


def _group_rows(q: QuantizedWeight) -> Iterator[tuple[int, Tensor | slice]]:
    if q.has_trivial_g_idx:
        for group in range(q.groups):
            yield group, slice(group * q.group_size, (group + 1) * q.group_size)
        return
    for group in range(q.groups):
        rows = (q.g_idx == group).nonzero()[:, 0]
        if len(rows):
            yield group, rows


def _whole_module(
    w: Tensor,
    q: QuantizedWeight,
    explanations: Iterable[tuple[str, Tensor, Tensor]],
    noise: _Noise,
    limit: float,
) -> Iterator[Fault]:
    """Faults of a whole tensor, judged on as many output channels as a sample needs."""
    columns = slice(0, max(64, _SAMPLED_ELEMENTS // q.in_features))
    groups = q.g_idx.long()
    base = _log_density(noise.r[:, columns], noise.sigma).sum()

    def gain(scales: Tensor, zeros: Tensor) -> float:
        s, z = scales[:, columns].float()[groups], zeros[:, columns].float()[groups]
        r = _distance(w[:, columns], q.codes[:, columns].float(), s, z, q.element.bits)
        return float(_log_density(r, noise.sigma).sum() - base)

    for what, scales, zeros in explanations:
        evidence = gain(scales, zeros)
        if evidence > limit:
            yield Fault(what, evidence)


def _other_explanations(
    q: QuantizedWeight, layout: Layout, spec: ModuleSpec, stored: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    suffix = next(name for name in ("scales", "s", "weight_scale") if name in stored)
    rows, columns = stored[suffix].shape
    if rows > 1 and columns > 1:
        restored = stored[suffix].reshape(columns, rows).t().contiguous()
        other = layout.unpack({**stored, suffix: restored}, spec)
        yield "scales are stored transposed", other.scales.to(q.scales.device), q.zeros
    top = (1 << q.element.bits) - 1
    for step, word in ((1, "low"), (-1, "high")):
        shifted = (q.zeros.short() + step).clamp_(0, top)
        yield f"zero points are one too {word}", q.scales, shifted


def _groups(w: Tensor, q: QuantizedWeight, noise: _Noise, limit: float) -> Iterator[Fault]:
    """One bit of a scale's sign or exponent flipped; one zero point off by one."""
    for group, rows in _group_rows(q):
        sigma = noise.sigma[rows]
        base = _log_density(noise.r[rows], sigma).sum(dim=0)
        # A fault makes the group more surprising than those of the other outputs.
        suspects = (base < base.median() - limit / 2).nonzero()[:, 0]
        if not len(suspects):
            continue
        stretch, shift = _oddness(w[rows], q, group, rows, noise.r[rows])
        part, codes = w[rows][:, suspects], q.codes[rows][:, suspects].float()
        scales, zeros = q.scales[group, suspects], q.zeros[group, suspects].float()
        best = torch.full((len(suspects),), -math.inf, device=w.device)
        names = [""] * len(suspects)
        # As many groups are judged as there are weights over the group size, not as there are pairs of codes.
        enough = limit - math.log(TESTS_PER_WEIGHT * q.group_size)
        for name, s, z, odd in _group_explanations(scales, zeros, stretch[suspects], shift[suspects]):
            r = _distance(part, codes, s, z, q.element.bits)
            gain = _log_density(r, sigma).sum(dim=0) - base[suspects]
            gain = torch.where(torch.isfinite(s) & (s != 0) & (odd > enough), gain, -math.inf)
            for i in (gain > best).nonzero()[:, 0].tolist():
                names[i] = name
            best = torch.maximum(best, gain)
        for i in (best > limit).nonzero()[:, 0].tolist():
            place = f"group {group} of output channel {int(suspects[i])}"
            yield Fault(f"{place}: {names[i]}", float(best[i]))


def _oddness(
    w: Tensor, q: QuantizedWeight, group: int, rows: Tensor | slice, r: Tensor
) -> tuple[Tensor, Tensor]:
    """How far each output's scale and zero point of one group are off, against the other outputs' of the
    same group, as -ln of a tail probability, [N] each."""
    scales, zeros = q.scales[group].float(), q.zeros[group].float()
    levels = q.codes[rows].float().sub_(zeros)
    slope = (w * levels).sum(dim=0).div_(scales).div_(levels.square().sum(dim=0).clamp_(min=1))
    # A scale of the wrong sign is as far off as one can be.
    stretch = slope.nan_to_num_(0).clamp_(math.exp(-_FARTHEST), math.exp(_FARTHEST)).log_().abs_()
    stretch[(levels == 0).all(dim=0)] = 0
    return _tail(stretch), _tail(r.mean(dim=0).abs())


def _tail(values: Tensor) -> Tensor:
    """-ln P of exceeding each value [N], by an exponential tail fitted to the largest of the others."""
    count = max(2, round(_TAIL_SHARE * len(values)))
    start = values.topk(min(count + 1, len(values))).values[-1]
    excess = (values - start).clamp_(min=0)
    spread = (excess.sum() - excess).div_(count - 1).clamp_(min=_SMALLEST_SPREAD)
    return excess.div_(spread).sub_(math.log(_TAIL_SHARE))


def _group_explanations(
    scales: Tensor, zeros: Tensor, stretch: Tensor, shift: Tensor
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    words = scales.view(torch.int32 if scales.dtype == torch.float32 else torch.int16)
    width = 8 * scales.dtype.itemsize
    mantissa = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}[scales.dtype]
    for bit in range(mantissa, width):
        mask = 1 << bit if bit < width - 1 else -(1 << bit)
        flipped = (words ^ mask).view(scales.dtype).float()
        yield f"bit {bit} of its scale is flipped", flipped, zeros, stretch
    for step, word in ((1, "low"), (-1, "high")):
        yield f"its zero point is one too {word}", scales.float(), zeros + step, shift


def _words(q: QuantizedWeight, layout: Layout, noise: _Noise, limit: float) -> Iterator[Fault]:
    """Codes exchanged within one stored word: any two, or the two of every byte."""
    tile = _word_tile(layout, q.element.bits, q.in_features, q.out_features)
    if tile is None:
        return
    height = tile.rows * max(1, _CHUNK_ELEMENTS // (q.out_features * tile.rows))
    for start in range(0, q.in_features, height):
        rows = slice(start, min(start + height, q.in_features))
        r = noise.r[rows]
        surprise = _log_density(r, noise.sigma[rows]).neg_()
        words = tile.words(surprise)
        # Undoing an exchange can't gain more than what the word lacks.
        suspects = (words.sum(dim=1) > limit).nonzero()[:, 0]
        if not len(suspects):
            continue
        lacks = words[suspects]
        codes = tile.words(q.codes[rows])[suspects].float()
        places = tile.words(r)[suspects] + codes
        sigma = tile.words(noise.sigma[rows].expand_as(r))[suspects]
        gains: list[tuple[str, Tensor]] = []
        bytes_swapped = torch.zeros(len(suspects), device=r.device)
        for i, j in combinations(range(codes.shape[1]), 2):
            exchanged = _log_density(places[:, i] - codes[:, j], sigma[:, i])
            exchanged += _log_density(places[:, j] - codes[:, i], sigma[:, j])
            gain = exchanged + lacks[:, i] + lacks[:, j]
            gains.append((f"slots {i} and {j} are exchanged", gain))
            if (i, j) in _BYTE_PARTNERS and q.element.bits == 4:
                bytes_swapped += gain
        gains.append(("the two codes of every byte are exchanged", bytes_swapped))
        stacked = torch.stack([gain for _, gain in gains])
        best, which = stacked.max(dim=0)
        for i in (best > limit).nonzero()[:, 0].tolist():
            k, n = tile.place(int(suspects[i]), q.out_features)
            where = f"the word that holds input channel {start + k} of output channel {n}"
            yield Fault(f"{where}: {gains[int(which[i])][0]}", float(best[i]))


def _channels(w: Tensor, q: QuantizedWeight, noise: _Noise, limit: float) -> Iterator[Fault]:
    """Input channels whose codes fit another group's scales: an entry of g_idx is wrong."""
    scales, zeros = q.scales.float(), q.zeros.float()
    codes = q.codes.float()
    offset = scales * zeros
    # ||w - (c - z) s||^2 of every channel under every group, expanded into matrix products.
    energy = (codes.square() @ scales.square().t()) - 2 * (codes @ (offset * scales).t())
    energy += offset.square().sum(dim=1) - 2 * ((w * codes) @ scales.t() - w @ offset.t())
    own = energy.gather(1, q.g_idx.long().unsqueeze(1))
    energy.scatter_(1, q.g_idx.long().unsqueeze(1), math.inf)
    other, group = energy.min(dim=1, keepdim=True)
    for k in (other < own)[:, 0].nonzero()[:, 0].tolist():
        g = int(group[k])
        r = _distance(w[k], codes[k], scales[g], zeros[g], q.element.bits)
        gain = _log_density(r, noise.sigma[k]).sum() - _log_density(noise.r[k], noise.sigma[k]).sum()
        if float(gain) > limit:
            what = f"input channel {k} fits group {g}, g_idx says {int(q.g_idx[k])}"
            yield Fault(what, float(gain))


@dataclass(frozen=True, eq=False)
class _Tile:
    """The smallest block of codes that fills whole words: ``order`` lists its places word by word."""

    rows: int
    columns: int
    slots: int
    order: Tensor

    def words(self, values: Tensor) -> Tensor:
        """[R, N] to [words, slots], each row the values of the codes in one word."""
        rows, columns = values.shape
        tiles = values.reshape(rows // self.rows, self.rows, columns // self.columns, self.columns)
        flat = tiles.transpose(1, 2).reshape(-1, self.rows * self.columns)
        return flat[:, self.order.to(values.device)].reshape(-1, self.slots)

    def place(self, word: int, columns: int) -> tuple[int, int]:
        """(row, column) of the first code of a word."""
        per_tile = self.rows * self.columns // self.slots
        tile, inside = divmod(word, per_tile)
        row, column = divmod(tile, columns // self.columns)
        first = int(self.order[inside * self.slots])
        return row * self.rows + first // self.columns, column * self.columns + first % self.columns


@lru_cache(maxsize=64)
def _word_tile(layout: Layout, bits: int, k: int, n: int) -> _Tile | None:
    for rows, columns in ((8, 8), (16, 64), (8, 1), (1, 8)):
        spec = ModuleSpec(rows, columns, Scheme(integer_element(bits), CHANNEL))
        if k % rows == 0 and n % columns == 0 and layout.shape_refusal(spec) is None:
            return _tile_of(layout, spec)
    return None


def _tile_of(layout: Layout, spec: ModuleSpec) -> _Tile:
    """Reads the order off the layout itself: words that hold their own number, then their slots' numbers."""
    shape = (spec.in_features, spec.out_features)
    blank = QuantizedWeight(
        codes=torch.zeros(shape, dtype=torch.uint8),
        scales=torch.ones((1, shape[1]), dtype=torch.float16),
        zeros=torch.full((1, shape[1]), spec.scheme.element.midpoint, dtype=torch.uint8),
        g_idx=trivial_g_idx(shape[0], -1),
        group_size=shape[0],
        element=spec.scheme.element,
    )
    stored = layout.pack(blank)
    bits = spec.scheme.element.bits
    spec = replace(spec, scheme=layout.as_stored(spec.scheme))
    slots = slots_per_word(spec.scheme.element.bits)
    count = stored[layout.key].numel()

    def unpacked(digits: Tensor) -> Tensor:
        words = pack_last(digits.to(torch.uint8).contiguous(), bits).reshape(stored[layout.key].shape)
        return layout.unpack({**stored, layout.key: words}, spec).codes.long()

    top = (1 << bits) - 1
    word = torch.arange(count).unsqueeze(1).expand(-1, slots)
    word_of = unpacked(word & top) + (unpacked(word >> bits) << bits)
    slot_of = unpacked(torch.arange(slots).expand(count, -1))
    order = torch.argsort((word_of * slots + slot_of).flatten())
    return _Tile(spec.in_features, spec.out_features, slots, order)
