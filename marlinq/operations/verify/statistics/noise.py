"""How far integer codes lie from their weights' places on the grid, and how far that is usual where they
are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight

DEGREES = 8.0
"""Of the Student t distribution that r / sigma is taken to follow."""

# Rounding alone leaves errors of this spread, in code units; a smaller sigma would be over-confident.
_SMALLEST_SIGMA = 12**-0.5
_TO_SIGMA = 1.4826
"""A normal distribution's sigma over its median absolute value."""
_CAP = 4.0
_CHUNK_ELEMENTS = 1 << 22
_LARGEST_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Noise:
    """r in code units, and the spread that is usual for it.

    Attributes:
        r: float32 [K, N], the weight's place on its clipped grid less its code.
        channel: float32 [K, 1], the robust spread of r over the outputs of each input channel.
        local: float32 [B, N], at least 1: how much wider than ``channel`` the errors of a block are.
        block: int64 [K], the block that a channel belongs to; blocks lie within quantisation groups.
    """

    r: Tensor
    channel: Tensor
    local: Tensor
    block: Tensor

    def sigma(self, rows: slice | Tensor) -> Tensor:
        """float32 [rows, N], ``channel * local``: what a single code's error is measured by."""
        return self.channel[rows] * self.local[self.block[rows]]


def log_density(r: Tensor, sigma: Tensor) -> Tensor:
    """Of the Student t distribution, without the terms that r does not change."""
    return (r / sigma).square_().div_(DEGREES).log1p_().mul_(-(DEGREES + 1) / 2)


def distance(w: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, largest: int) -> Tensor:
    """r: how far each weight's place on the grid is from its code; beyond the grid's ends is no distance.

    ``scales`` and ``zeros`` broadcast against ``w`` and ``codes``; ``largest`` is the largest code.
    """
    place = w.div(scales).add_(zeros)
    # 0 / 0: a weight of zero lies at the zero point whatever the scale is.
    place = torch.where(place.isnan(), zeros.expand_as(place), place)
    return place.clamp_(0, largest).sub_(codes)


def group_rows(q: QuantizedWeight) -> Iterator[tuple[int, Tensor | slice]]:
    """Every group that has input channels, and which."""
    if q.has_trivial_g_idx:
        for group in range(q.groups):
            yield group, slice(group * q.channels_per_group, (group + 1) * q.channels_per_group)
        return
    for group in range(q.groups):
        rows = (q.g_idx == group).nonzero()[:, 0]
        if len(rows):
            yield group, rows


def measure_noise(w: Tensor, q: QuantizedWeight) -> Noise:
    """The noise of one module; ``w`` is the original, float32 [K, N], on the device of ``q``."""
    r = torch.empty(q.codes.shape, device=w.device)
    for group, rows in group_rows(q):
        scales, zeros = q.scales[group].float(), q.zeros[group].float()
        r[rows] = distance(w[rows], q.codes[rows].float(), scales, zeros, q.element.codes - 1)
    channel = torch.empty((q.in_features, 1), device=w.device)
    step = max(1, _CHUNK_ELEMENTS // q.out_features)
    for start in range(0, q.in_features, step):
        part = r[start : start + step]
        channel[start : start + step] = _spread(part, dim=1)
    block = torch.zeros(q.in_features, dtype=torch.int64, device=w.device)
    local: list[Tensor] = []
    for _, rows in group_rows(q):
        members = torch.arange(q.in_features, device=w.device)[rows]
        for start in range(0, len(members), _LARGEST_BLOCK):
            part = members[start : start + _LARGEST_BLOCK]
            block[part] = len(local)
            local.append(_spread(r[part] / channel[part], dim=0).clamp_(min=1))
    return Noise(r, channel, torch.cat(local), block)


def _spread(r: Tensor, dim: int) -> Tensor:
    """The root mean square along ``dim``; faults must not widen the noise that they are measured by."""
    size = r.abs()
    rough = size.median(dim=dim, keepdim=True).values.mul_(_TO_SIGMA).clamp_(min=_SMALLEST_SIGMA)
    size = torch.minimum(size, _CAP * rough)
    return size.square_().mean(dim=dim, keepdim=True).sqrt_().clamp_(min=_SMALLEST_SIGMA)
