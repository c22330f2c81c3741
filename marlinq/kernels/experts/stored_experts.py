"""Stored weights of a layer's experts, in the dense kernels' tiles; gate and up are one operand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.formats.layouts.marlin import TILE_N, permute_scales
from marlinq.kernels.contract.weight_formats import WeightFormat

_BLOCKS = 4  # blocks of 16 columns in a tile, and in a lane's vector of scales


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """One product of all E experts of a layer, K channels and N columns each.

    Attributes:
        format: weight format of the words.
        granularity: one of :data:`marlinq.kernels.contract.problem.GRANULARITIES`.
        words: int32 [E, K / format.row_channels, N * format.row_words].
        scales: [E, G, N] in the activations' dtype, stored order.
        zeros: zero points [E, G, N] like ``scales``; None where all are the format's midpoint.
        bias: None or [E, N] in the activations' dtype, in the order of the columns.
    """

    format: WeightFormat
    granularity: Granularity
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, K and N."""
        experts, rows, words = self.words.shape
        return experts, rows * self.format.row_channels, words // self.format.row_words

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """Words, scales, zero points and biases by the names of these attributes."""
        return {"words": self.words, "scales": self.scales, "zeros": self.zeros, "bias": self.bias}

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales, zero points and biases."""
        return sum(value.nbytes for value in self.tensors.values() if value is not None)


class ExpertWeights(NamedTuple):
    """The weights of :func:`marlinq.kernels.experts.routed_experts`, all in one format and granularity.

    Attributes:
        gate_up: K = hidden size H, N = 2I, made by :func:`interleave_gate_up`.
        down: K = I, N = H.
    """

    gate_up: StoredExperts
    down: StoredExperts


def interleave_gate_up(gate: StoredExperts, up: StoredExperts) -> StoredExperts:
    """Gate and up [E, K, I] as one operand of 2I columns, alternating 16 of gate and 16 of up.

    Columns 32j .. 32j + 15 of the result are gate's 16j .. 16j + 15, the next 16 are up's. Words are moved
    without unpacking them.

    Raises:
        ValueError: formats, shapes or dtypes differ, one alone has zero points or biases, or I is no multiple
            of 64.
    """
    if (gate.format, gate.granularity) != (up.format, up.granularity):
        raise ValueError(
            f"gate and up: expected one weight format and granularity, found {gate.format.name} with "
            f"{gate.granularity.describe()} and {up.format.name} with {up.granularity.describe()}"
        )
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
    return replace(
        gate,
        words=_interleave_words(gate.words, up.words, gate.format.block_words),
        scales=_interleave_scales(gate.scales, up.scales),
        zeros=zeros,
        bias=bias,
    )


def _interleave_words(first: Tensor, second: Tensor, block_words: int) -> Tensor:
    """[E, R, words] alternating 16 columns of ``first`` and of ``second``, in tiles of
    ``cuda/codec/lane_words.cuh``."""
    if block_words == 1:
        return _take_turns(first, second, lanes=32, width=1)
    # A tile has two planes of two blocks of 16 columns: [E, R, tile, plane, lane, block, word of the block].
    experts, rows, size = first.shape
    parts = [value.reshape(experts, rows, -1, 2, 32, 2, 2) for value in (first, second)]
    # Each pair of planes, one of gate and one of up, becomes a tile of the result.
    return torch.stack(parts, dim=6).transpose(4, 5).reshape(experts, rows, 2 * size)


def _take_turns(first: Tensor, second: Tensor, lanes: int, width: int) -> Tensor:
    """[E, R, tiles * lanes * 4 * width], alternating blocks of 16 columns; a lane's vector holds four
    blocks."""
    experts, rows, size = first.shape
    tiles = size // (lanes * _BLOCKS * width)
    parts = [value.reshape(experts, rows, tiles, lanes, 2, 2, width) for value in (first, second)]
    # [E, R, tile, lane, half of the tile, block of the half, gate or up, width]
    both = torch.stack(parts, dim=6)
    return both.transpose(3, 4).reshape(experts, rows, 2 * size)


def _interleave_scales(first: Tensor, second: Tensor) -> Tensor:
    """Two scales [E, G, I] in stored order as one [E, G, 2I] in stored order."""
    experts, groups, size = first.shape
    if groups > 1:
        # A lane's eight scales of a tile are adjacent: four pairs of columns n and n + 8.
        return _take_turns(first, second, lanes=8, width=2).contiguous()
    natural = [permute_single(value).reshape(experts, size // 16, 16) for value in (first, second)]
    return permute_single(torch.stack(natural, dim=2).reshape(experts, 1, 2 * size))


def permute_single(scales: Tensor) -> Tensor:
    """Scales [E, 1, N] of a single group, from channel order to stored order or back."""
    experts, _, n = scales.shape
    # Every tile has the same permutation, so the experts' columns may be joined.
    return permute_scales(scales.reshape(1, experts * n)).reshape(experts, 1, n)
