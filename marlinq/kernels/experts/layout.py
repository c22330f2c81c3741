"""The stored weights of a layer's experts: gate and up as one operand, Marlin tiles as everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.formats.layouts.marlin import TILE_N, permute_scales
from marlinq.kernels.contract.weight_formats import WeightFormat

_BLOCKS = 4  # of 16 columns, in a tile and in a lane's vector of scales


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
        """Words, scales, zero points and biases by their names here."""
        return {"words": self.words, "scales": self.scales, "zeros": self.zeros, "bias": self.bias}

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales, zero points and biases."""
        return sum(value.nbytes for value in self.tensors.values() if value is not None)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> StoredExperts:
        """The same product with ``change`` of every tensor."""
        changed = {name: None if value is None else change(value) for name, value in self.tensors.items()}
        return StoredExperts(self.format, self.granularity, **changed)  # type: ignore[arg-type]


class ExpertWeights(NamedTuple):
    """What :func:`marlinq.kernels.experts.routed_experts` multiplies with, in one format and granularity.

    Attributes:
        gate_up: K = hidden size H, N = 2I, made by :func:`interleave_gate_up`.
        down: K = I, N = H.
    """

    gate_up: StoredExperts
    down: StoredExperts


def interleave_gate_up(gate: StoredExperts, up: StoredExperts) -> StoredExperts:
    """Gate and up [E, K, I] as one operand of 2I columns, whose blocks of 16 columns take turns.

    Columns 32j .. 32j + 15 of the result are gate's 16j .. 16j + 15, the next 16 are up's. Whole words move,
    so nothing is unpacked.

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
    """[E, R, words] with blocks of 16 columns in turns, in the tiles of ``cuda/codec/lane_words.cuh``."""
    if block_words == 1:
        return _take_turns(first, second, lanes=32, width=1)
    # A tile's halves are its two planes: [E, R, tile, plane, lane, block of the plane, word of the block].
    experts, rows, size = first.shape
    parts = [value.reshape(experts, rows, -1, 2, 32, 2, 2) for value in (first, second)]
    # A plane becomes a tile, whose planes are its blocks, gate's and up's.
    return torch.stack(parts, dim=6).transpose(4, 5).reshape(experts, rows, 2 * size)


def _take_turns(first: Tensor, second: Tensor, lanes: int, width: int) -> Tensor:
    """[E, R, tiles * lanes * 4 * width]: blocks of 16 columns in turns; a lane's vector holds four."""
    experts, rows, size = first.shape
    tiles = size // (lanes * _BLOCKS * width)
    parts = [value.reshape(experts, rows, tiles, lanes, 2, 2, width) for value in (first, second)]
    # [E, R, tile, lane, half of the tile, block of the half, gate or up, width]
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
