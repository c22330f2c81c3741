"""The distance r of integer codes from their weights' places on the grid, and its usual spread sigma."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight

DEGREES = 8.0
"""degrees of freedom of the Student t distribution that r / sigma is assumed to follow"""

_SMALLEST_SIGMA = 12**-0.5
"""least sigma in code units: the spread that rounding alone leaves"""
_TO_SIGMA = 1.4826
"""A normal distribution's sigma over its median absolute value."""
_CAP = 4.0
_CHUNK_ELEMENTS = 1 << 22
_LARGEST_BLOCK = 128
_SMALLEST_PIECE = 8
"""least number of input channels of a piece: smaller ones cost memory and gain nothing"""


@dataclass(frozen=True, eq=False)
class Noise:
    """r in code units, and its usual spread.

    Attributes:
        r: float32 [K, N], a weight's place on its clipped grid minus its code.
        channel: float32 [K, 1], robust spread of r over the outputs of each input channel.
        local: float32 [P, N], at least 1: ratio of the spread near a piece to ``channel``.
        piece: int64 [K], index of the piece of each channel; pieces lie inside quantisation groups.
    """

    r: Tensor
    channel: Tensor
    local: Tensor
    piece: Tensor

    def sigma(self, rows: slice | Tensor) -> Tensor:
        """float32 [rows, N]: ``channel * local``, the usual spread of each code's r."""
        return self.channel[rows] * self.local[self.piece[rows]]


def log_density(r: Tensor, sigma: Tensor) -> Tensor:
    """Logarithm of the Student t density of r / sigma, without terms that don't depend on r."""
    return (r / sigma).square_().div_(DEGREES).log1p_().mul_(-(DEGREES + 1) / 2)


def distance(w: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, largest: int) -> Tensor:
    """r: each weight's place on the grid, clipped to 0..``largest``, minus its code.

    ``scales`` and ``zeros`` broadcast against ``w`` and ``codes``; ``largest`` is the largest code.
    """
    place = w.div(scales).add_(zeros)
    # 0 / 0: a weight of zero is at the zero point with any scale.
    place = torch.where(place.isnan(), zeros.expand_as(place), place)
    return place.clamp_(0, largest).sub_(codes)


def group_rows(q: QuantizedWeight) -> Iterator[tuple[int, Tensor | slice]]:
    """(index, input channels) of every group that has any."""
    if q.has_trivial_g_idx:
        for group in range(q.groups):
            yield group, slice(group * q.channels_per_group, (group + 1) * q.channels_per_group)
        return
    for group in range(q.groups):
        rows = (q.g_idx == group).nonzero()[:, 0]
        if len(rows):
            yield group, rows


def measure_noise(w: Tensor, q: QuantizedWeight, word_rows: int = 1) -> Noise:
    """The noise of one module.

    Args:
        w: original weight, float32 [K, N], on the device of ``q``.
        q: stored weight.
        word_rows: number of neighbouring input channels that one stored word's codes lie in.
    """
    size = max(word_rows, _SMALLEST_PIECE)
    r = torch.empty(q.codes.shape, device=w.device)
    for group, rows in group_rows(q):
        scales, zeros = q.scales[group].float(), q.zeros[group].float()
        r[rows] = distance(w[rows], q.codes[rows].float(), scales, zeros, q.element.codes - 1)
    channel = torch.empty((q.in_features, 1), device=w.device)
    step = max(1, _CHUNK_ELEMENTS // q.out_features)
    for start in range(0, q.in_features, step):
        part = r[start : start + step]
        channel[start : start + step] = _spread(part, dim=1)
    piece = torch.zeros(q.in_features, dtype=torch.int64, device=w.device)
    local: list[Tensor] = []
    pieces = 0
    for _, rows in group_rows(q):
        members = torch.arange(q.in_features, device=w.device)[rows]
        for start in range(0, len(members), _LARGEST_BLOCK):
            part = members[start : start + _LARGEST_BLOCK]
            piece[part] = pieces + torch.arange(len(part), device=w.device) // size
            local.append(_spread_of_others(r[part] / channel[part], size).clamp_(min=1))
            pieces += len(local[-1])
    return Noise(r, channel, torch.cat(local), piece)


def _spread_of_others(r: Tensor, size: int) -> Tensor:
    """Spread of each column of a block [k, N] outside each of its pieces of ``size`` rows.

    A word's own codes must not widen the noise that they are judged by: eight exchanged codes would triple
    that of a block of 32. The only piece of a block is not left out.

    Returns:
        float32 [pieces, N].
    """
    squares = torch.split(_capped(r, dim=0).square_(), size)
    sums = torch.stack([piece.sum(dim=0) for piece in squares])
    counts = torch.tensor([len(piece) for piece in squares], device=r.device).unsqueeze(1)
    if len(squares) > 1:
        sums, counts = sums.sum(dim=0) - sums, counts.sum() - counts
    return sums.div_(counts).clamp_(min=0).sqrt_()


def _spread(r: Tensor, dim: int) -> Tensor:
    """Root mean square along ``dim`` of values capped at 4, so that faults hardly widen it."""
    return _capped(r, dim).square_().mean(dim=dim, keepdim=True).sqrt_().clamp_(min=_SMALLEST_SIGMA)


def _capped(r: Tensor, dim: int) -> Tensor:
    """|r|, at most 4 times the spread that its median along ``dim`` tells."""
    size = r.abs()
    rough = size.median(dim=dim, keepdim=True).values.mul_(_TO_SIGMA).clamp_(min=_SMALLEST_SIGMA)
    return torch.minimum(size, _CAP * rough)
