"""The stored weights of a layer's experts: gate and up as one operand, Marlin tiles as everywhere else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.formats.layouts.marlin import TILE_N, permute_scales
from marlinq.kernels.contract.weight_formats import WeightFormat

_WORDS = 4  # of a lane's vector: 16 columns each


class StoredExperts(NamedTuple):
    """One product of all E experts of a layer, K channels and N columns each.

    Attributes:
        words: int32 [E, K/16, 2N].
        scales: [E, G, N] in the activations' dtype, stored order.
        zeros: None for symmetric weights, else zero points [E, G, N] like ``scales``.
        bias: None or [E, N] in the activations' dtype, in the order of the columns.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, K and N."""
        experts, rows, words = self.words.shape
        return experts, rows * 16, words // 2

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales, zero points and biases."""
        return sum(value.nbytes for value in self if value is not None)


class ExpertWeights(NamedTuple):
    """What ``torch.ops.marlinq.w4a16_experts`` multiplies with.

    Attributes:
        gate_up: K = hidden size H, N = 2I, made by :func:`interleave_gate_up`.
        down: K = I, N = H.
        granularity: one of :data:`marlinq.kernels.contract.problem.GRANULARITIES`, of both.
        format: weight format of both.
    """

    gate_up: StoredExperts
    down: StoredExperts
    granularity: Granularity
    format: WeightFormat


def interleave_gate_up(gate: StoredExperts, up: StoredExperts) -> StoredExperts:
    """Gate and up [E, K, I] as one operand of 2I columns, whose blocks of 16 columns take turns.

    Columns 32j .. 32j + 15 of the result are gate's 16j .. 16j + 15, the next 16 are up's. Whole words move,
    so nothing is unpacked.

    Raises:
        ValueError: shapes or dtypes differ, one alone has zero points or biases, or I is no multiple of 64.
    """
    if gate.shape != up.shape or gate.scales.shape != up.scales.shape or gate.shape[2] % TILE_N:
        raise ValueError(
            f"gate and up: expected the same shape [E, K, I], I a multiple of {TILE_N}, and the same groups, "
            f"found {gate.shape} with scales {list(gate.scales.shape)} and {up.shape} with "
            f"{list(up.scales.shape)}"
        )
    if (gate.zeros is None) != (up.zeros is None) or gate.scales.dtype != up.scales.dtype:
        raise ValueError("gate and up: expected zero points of both or of none, and scales of one dtype")
    zeros = None if gate.zeros is None or up.zeros is None else _interleave_scales(gate.zeros, up.zeros)
    if (gate.bias is None) != (up.bias is None):
        raise ValueError("gate and up: expected biases of both or of none")
    bias = None
    if gate.bias is not None and up.bias is not None:
        blocks = [value.reshape(len(value), -1, 16) for value in (gate.bias, up.bias)]
        bias = torch.stack(blocks, dim=2).flatten(1)
    words = _take_turns(gate.words, up.words, lanes=32, width=1)
    return StoredExperts(words, _interleave_scales(gate.scales, up.scales), zeros, bias)


def _take_turns(first: Tensor, second: Tensor, lanes: int, width: int) -> Tensor:
    """[E, R, tiles * lanes * 4 * width]: parts of 16 columns in turns; a lane's vector holds four."""
    experts, rows, size = first.shape
    tiles = size // (lanes * _WORDS * width)
    parts = [value.reshape(experts, rows, tiles, lanes, 2, 2, width) for value in (first, second)]
    # [E, R, tile, lane, half of the tile, word of the half, gate or up, width]
    both = torch.stack(parts, dim=6)
    return both.transpose(3, 4).reshape(experts, rows, 2 * size)


def _interleave_scales(first: Tensor, second: Tensor) -> Tensor:
    """[E, G, I] in stored order, twice, to [E, G, 2I] in stored order."""
    experts, groups, size = first.shape
    if groups > 1:
        # A lane's eight of a tile lie together: four pairs of columns n and n + 8.
        return _take_turns(first, second, lanes=8, width=2).contiguous()
    natural = [permute_single(value).reshape(experts, size // 16, 16) for value in (first, second)]
    return permute_single(torch.stack(natural, dim=2).reshape(experts, 1, 2 * size))


def permute_single(scales: Tensor) -> Tensor:
    """Scales [E, 1, N] of a single group between channel order and stored order."""
    experts, _, n = scales.shape
    # Tiles are permuted alike, so experts may lie side by side.
    return permute_scales(scales.reshape(1, experts * n)).reshape(experts, 1, n)
