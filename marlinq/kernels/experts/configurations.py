"""Shapes of routed layers, and configurations of their kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.instantiation import Instantiation, Parameters
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.kernels.experts.stored_experts import ExpertWeights
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig

# Bytes of shared memory by which transposing 16 columns a warp (16 rows at once) exceeds 32 columns (8 rows).
_SINGLE_COLUMNS_MORE = 1024


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes and types of a routed layer and its batch. A pair is a row with one of its experts.

    Attributes:
        m: rows of the batch.
        top: experts of a row.
        experts: number of experts whose weights are on this GPU.
        hidden: H, a multiple of 64.
        inner: I, a multiple of 64.
        granularity: one of :data:`marlinq.kernels.contract.problem.GRANULARITIES`, of all weights.
        zeros: whether zero points are stored.
        bfloat16: whether activations and scales are bfloat16; float16 otherwise.
        format: weight format of the words.
        biased: whether both products have biases.
    """

    m: int
    top: int
    experts: int
    hidden: int
    inner: int
    granularity: Granularity
    zeros: bool
    bfloat16: bool
    format: WeightFormat
    biased: bool = False

    @classmethod
    def of(cls, m: int, top: int, experts: ExpertWeights) -> ExpertsShape:
        """Sizes and types for ``m`` rows with ``top`` experts each."""
        stored = experts.down
        count, inner, hidden = stored.shape
        return cls(
            m,
            top,
            count,
            hidden,
            inner,
            stored.granularity,
            stored.zeros is not None,
            stored.scales.dtype == torch.bfloat16,
            stored.format,
            stored.bias is not None,
        )

    @property
    def pairs(self) -> int:
        """Number of pairs of a row and an expert: rows of the grouped products."""
        return self.m * self.top

    def product(self, *, gated: bool) -> Problem:
        """The product of one expert with the batch: gate and up if ``gated``, else down."""
        n, k = (2 * self.inner, self.hidden) if gated else (self.hidden, self.inner)
        granularity = self.granularity.for_channels(k)
        return Problem(self.m, n, k, granularity, self.zeros, self.bfloat16, self.format)


@dataclass(frozen=True)
class GroupedConfig:
    """Configuration of ``cuda/kernels/experts_warpgroup.cuh``, the product over sorted pairs.

    Attributes:
        tile: configuration of the dense warpgroup kernel that it is built on.
        gated: whether columns are gate and up.
        biased: whether biases are added.
        blocks: largest grid; blocks take tile after tile.
        local_pairs: largest number of pairs, which every block then sorts for itself; 0 where another kernel
            has sorted them.
        experts: largest number of experts where blocks sort pairs; else 0.
    """

    tile: WarpgroupConfig
    gated: bool
    biased: bool
    blocks: int
    local_pairs: int = 0
    experts: int = 0

    def instantiation(self, problem: Problem, activation: str, *, wide: bool) -> Instantiation:
        """Kernel to compile for ``problem``, the product of one expert; ``wide``: ids have 64 bits."""
        parameters: Parameters = (
            *self.tile.instantiation(problem).parameters,
            ("GATED", self.gated),
            ("BIASED", self.biased),
            ("GROUPED_SHARED_BYTES", self.shared_bytes(problem)),
            ("ACTIVATION", f"Activation::{activation.upper()}"),
            ("HERE", self.local_pairs),
            ("EXPERTS", self.experts),
            ("WIDE", wide and self.local_pairs > 0),
            ("SORTING_BYTES", self.sorting_bytes),
        )
        return Instantiation("kernels/experts_warpgroup.cuh", "experts_wgmma", parameters)

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block."""
        more = _SINGLE_COLUMNS_MORE * self.tile.multiplying if self.gated and self.tile.words == 2 else 0
        return self.tile.shared_bytes(problem) + more

    @property
    def sorting_bytes(self) -> int:
        """Bytes of static shared memory with which a block sorts pairs (``cuda/experts/few_pairs.cuh``)."""
        if not self.local_pairs:
            return 0
        tiles = self.local_pairs // self.tile.tile_m + min(self.local_pairs, self.experts)
        counted = (
            self.local_pairs // 16 * self.experts + 2 * (self.local_pairs + self.experts) + self.experts // 8
        )
        return -(-(counted + 8 * tiles) // 8) * 8

    def grid(self, problem: Problem, tiles: int) -> int:
        """Blocks of a launch with at most ``tiles`` tiles of sorted rows."""
        return min(self.blocks, tiles * -(-problem.n // self.tile.tile_n))


@dataclass(frozen=True)
class DirectConfig:
    """Configuration of a product over unsorted pairs.

    The kernel is ``cuda/kernels/experts_stream.cuh`` (a product for each pair), or
    ``cuda/kernels/experts_shared.cuh`` (pairs of one expert are multiplied together).

    Attributes:
        tile: configuration of the dense stream kernel that it is built on.
        gated: whether columns are gate and up.
        slots: experts of a row.
        columns: pairs of an expert, or rows of the batch, that are multiplied together; 0: each by itself.
        biased: whether biases are added.
        further: whether the last experts lie in other memory than the first ones.
    """

    tile: StreamConfig
    gated: bool
    slots: int
    columns: int = 0
    biased: bool = False
    further: bool = False

    def instantiation(self, problem: Problem, activation: str, *, wide: bool) -> Instantiation:
        """Kernel to compile for ``problem``, the product of one expert; ``wide``: ids have 64 bits."""
        parameters: Parameters = (
            *self.tile.instantiation(self._columns(problem)).parameters,
            ("FURTHER", self.further),
            ("GATED", self.gated),
            ("BIASED", self.biased),
            ("ACTIVATION", f"Activation::{activation.upper()}"),
            ("WIDE", wide),
            ("SLOTS", self.slots),
        )
        if not self.columns:
            return Instantiation("kernels/experts_stream.cuh", "experts_stream", parameters)
        more: Parameters = (
            ("COLUMNS", self.columns),
            ("GROUPED_SHARED_BYTES", self.shared_bytes(problem)),
        )
        return Instantiation("kernels/experts_shared.cuh", "experts_shared", (*parameters, *more))

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block."""
        if not self.columns:
            return self.tile.shared_bytes(replace(problem, m=1))
        tile = self.tile
        reduction = tile.warps_k * self.columns * (tile.tile_n + 4) * 4
        segments = 1 if self.gated else self.columns * self.slots
        return max(tile.stages * self.stage_bytes(problem), reduction) + segments * (4 + 2 * self.columns)

    def stage_bytes(self, problem: Problem) -> int:
        """Bytes of a stage of the ring, where pairs share experts."""
        tile = self.tile
        groups = 1 if problem.quant_group == 0 else max(1, tile.chunk // problem.quant_group)
        of_warp = tile.rows * 64 * problem.format.row_bytes + groups * (2 if problem.zeros else 1) * 128
        return tile.warps_n * tile.warps_k * of_warp + tile.warps_k * self.columns * tile.chunk * 2

    def grid(self, problem: Problem, m: int, experts: int) -> int:
        """Blocks of a launch for ``m`` rows of the batch and ``experts`` experts."""
        pairs = m * self.slots
        if not self.columns:
            units = pairs if self.gated else m
        elif self.gated:
            # Most groups of pairs that can arise.
            units = min(pairs, experts + pairs // self.columns)
        else:
            units = -(-m // self.columns)
        return -(-problem.n // self.tile.tile_n) * units * self.tile.cluster

    def _columns(self, problem: Problem) -> Problem:
        return replace(problem, m=self.columns or 1)


@dataclass(frozen=True)
class SortedDecision:
    """Pairs are sorted by expert, two launches multiply, and a last launch sums the experts of each row.

    Attributes:
        gate_up: configuration of the first product.
        down: configuration of the second product; its tiles have as many rows as the first product's.
        reason: one sentence of text.
    """

    gate_up: GroupedConfig
    down: GroupedConfig
    reason: str

    @property
    def tile_m(self) -> int:
        """Sorted rows of a tile."""
        return self.gate_up.tile.tile_m

    @property
    def local_sort(self) -> bool:
        """Whether the blocks of the products sort pairs themselves, without a launch that sorts."""
        return self.gate_up.local_pairs > 0


@dataclass(frozen=True)
class DirectDecision:
    """Two launches multiply unsorted pairs; the second also sums the experts of each row.

    Attributes:
        gate_up: configuration of the first product.
        down: configuration of the second product.
        reason: one sentence of text.
    """

    gate_up: DirectConfig
    down: DirectConfig
    reason: str

    def with_further(self) -> DirectDecision:
        """The same for a layer whose last experts lie in other memory."""
        first, second = (replace(config, further=True) for config in (self.gate_up, self.down))
        return DirectDecision(first, second, self.reason)


ExpertsDecision = SortedDecision | DirectDecision
"""Configurations of a routed layer's launches, with and without sorting."""
