"""Which variants a routed layer's launches take: a decision with its reason, made without a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.decide import stream
from marlinq.kernels.decide.device import Device
from marlinq.kernels.decide.problem import Problem
from marlinq.kernels.decide.stages import stage_bytes
from marlinq.kernels.decide.stream import StreamConfig
from marlinq.kernels.decide.warpgroup import WarpgroupConfig
from marlinq.kernels.jit.instantiation import Instantiation, Parameters

MOST_EXPERTS = 512
"""Experts that ``cuda/experts/route.cuh`` sorts."""


class Columns(NamedTuple):
    """How a grouped product shares columns.

    Attributes:
        words: 16-column blocks of a warp, 2 or 4.
        warpgroups: of a block, side by side.
        blocks: a multiprocessor.
    """

    words: int
    warpgroups: int
    blocks: int


_TILES_M = (8, 16, 32, 48, 64, 80, 96, 112, 128)
# Tiles of few rows are bound by the memory, and by what a warpgroup does for a chunk beside its products: it
# takes many columns. Two blocks, so that one multiplies while the other ends a tile.
_FEW_ROWS_MOST = 32
_COLUMNS_FEW = (Columns(4, 1, 2), Columns(2, 1, 2), Columns(2, 1, 3), Columns(4, 2, 1))
_COLUMNS_MANY = (Columns(2, 2, 1),)
# Of a tile, as far as registers go without spills (tests/kernels/test_experts_choose.py).
_ROWS_MOST = {
    Columns(4, 1, 2): 32,
    Columns(2, 1, 2): 64,
    Columns(2, 1, 3): 16,
    Columns(4, 2, 1): 32,
    Columns(2, 2, 1): 128,
}
_ROWS, _STAGES_MOST = 8, 12  # of a chunk, and of a ring
_WORTH_MEASURING = 1.4
# Cycles of a multiprocessor for a chunk of 128 channels and 256 columns: its bytes' share of the memory, its
# words' way into registers, and its products, of which a part by the rows of the tile.
_MEMORY, _UNPACKING, _CHUNK, _ROW = 870.0, 700.0, 350.0, 17.6
_UNLIMITED = 1 << 30
# More pairs than these read experts again and again.
_DIRECT_PAIRS = 128
# Seconds of sorting, starting and adding, and the share of the memory's bandwidth that grouped products
# reach.
_SORTED_FIXED, _SORTED_BANDWIDTH = 8e-6, 0.85
# Bytes that a warpgroup takes to transpose 16 columns a warp, beyond those for 32: the former come as 16
# rows.
_SINGLE_COLUMNS_MORE = 1024
# Barriers, and what the driver keeps of every block.
_RESERVED = 1280


@dataclass(frozen=True)
class ExpertsShape:
    """What decides: a routed layer and its batch.

    Attributes:
        m: rows of the batch.
        top: experts of a row.
        experts: whose weights are here.
        hidden: H, a multiple of 64.
        inner: I, a multiple of 64.
        group_size: 32, 64, 128 or -1.
        zeros: whether zero points are stored.
        bfloat16: the type of activations and scales; float16 otherwise.
    """

    m: int
    top: int
    experts: int
    hidden: int
    inner: int
    group_size: int
    zeros: bool
    bfloat16: bool

    @property
    def pairs(self) -> int:
        """Rows of the grouped products."""
        return self.m * self.top

    def product(self, *, gated: bool) -> Problem:
        """Gate and up, or down, of one expert."""
        n, k = (2 * self.inner, self.hidden) if gated else (self.hidden, self.inner)
        group_size = -1 if self.group_size == k else self.group_size
        return Problem(self.m, n, k, group_size, self.zeros, self.bfloat16)


@dataclass(frozen=True)
class GroupedConfig:
    """A variant of ``cuda/kernels/experts_warpgroup.cuh``.

    Attributes:
        tile: of the dense kernel, whose parts it is made of.
        gated: whether columns are gate and up.
        blocks: of the persistent grid at most.
    """

    tile: WarpgroupConfig
    gated: bool
    blocks: int

    def instantiation(self, problem: Problem, activation: str) -> Instantiation:
        """What is compiled for ``problem``, the product of one expert."""
        parameters: Parameters = (
            *self.tile.instantiation(problem).parameters,
            ("GATED", self.gated),
            ("GROUPED_SHARED_BYTES", self.shared_bytes(problem)),
            ("ACTIVATION", f"Activation::{activation.upper()}"),
        )
        return Instantiation("kernels/experts_warpgroup.cuh", "experts_wgmma", parameters)

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block."""
        more = _SINGLE_COLUMNS_MORE * self.tile.multiplying if self.gated and self.tile.words == 2 else 0
        return self.tile.shared_bytes(problem) + more

    def grid(self, problem: Problem, tiles: int) -> int:
        """Blocks of a launch with at most ``tiles`` tiles of sorted rows."""
        return min(self.blocks, tiles * -(-problem.n // self.tile.tile_n))


@dataclass(frozen=True)
class DirectConfig:
    """A variant of ``cuda/kernels/experts_stream.cuh``.

    Attributes:
        tile: of the dense kernel that it is built on.
        gated: whether columns are gate and up.
        slots: experts of a row.
    """

    tile: StreamConfig
    gated: bool
    slots: int

    def instantiation(self, problem: Problem, activation: str, *, wide: bool) -> Instantiation:
        """What is compiled for ``problem``, the product of one expert; ``wide``: ids have 64 bits."""
        parameters: Parameters = (
            *self.tile.instantiation(replace(problem, m=1)).parameters,
            ("GATED", self.gated),
            ("ACTIVATION", f"Activation::{activation.upper()}"),
            ("WIDE", wide),
            ("SLOTS", self.slots),
        )
        return Instantiation("kernels/experts_stream.cuh", "experts_stream", parameters)

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block."""
        return self.tile.shared_bytes(replace(problem, m=1))

    def grid(self, problem: Problem, m: int) -> int:
        """Blocks of a launch for ``m`` rows of the batch."""
        units = m * self.slots if self.gated else m
        return -(-problem.n // self.tile.tile_n) * units * self.tile.cluster


@dataclass(frozen=True)
class SortedDecision:
    """Pairs are sorted by expert, products are grouped, and a last launch adds.

    Attributes:
        gate_up: of the first product.
        down: of the second; tiles have as many rows as those of the first.
        reason: in a sentence.
    """

    gate_up: GroupedConfig
    down: GroupedConfig
    reason: str

    @property
    def tile_m(self) -> int:
        """Sorted rows of a tile."""
        return self.gate_up.tile.tile_m


@dataclass(frozen=True)
class DirectDecision:
    """Every pair takes its expert as it comes, in two launches.

    Attributes:
        gate_up: of the first product.
        down: of the second.
        reason: in a sentence.
    """

    gate_up: DirectConfig
    down: DirectConfig
    reason: str


ExpertsDecision = SortedDecision | DirectDecision
"""How a routed layer is launched."""


@lru_cache(maxsize=4096)
def decide_experts(shape: ExpertsShape, device: Device) -> ExpertsDecision:
    """The variants for ``shape`` on ``device``.

    Raises:
        UnsupportedError: more experts than are sorted, or a layer that no variant fits.
    """
    found = direct(shape, device)
    if found is not None and (not device.has_warpgroups or found[1] < sorted_seconds(shape, device)):
        return found[0]
    if not device.has_warpgroups:
        raise UnsupportedError(f"{shape.top} experts a row: no variant fits {device.architecture}")
    if shape.experts > MOST_EXPERTS:
        raise UnsupportedError(f"{shape.experts} experts on one GPU: at most {MOST_EXPERTS} are sorted")
    for tile_m in _heights(shape):
        for columns in _COLUMNS_FEW if tile_m <= _FEW_ROWS_MOST else _COLUMNS_MANY:
            chosen = grouped_decision(shape, device, tile_m, columns)
            if chosen is not None:
                return chosen
    raise UnsupportedError(
        f"experts with groups of {shape.group_size}: no variant fits {device.architecture}"
    )


def _heights(shape: ExpertsShape) -> list[int]:
    """Rows of a tile, the best first."""
    return sorted(_TILES_M, key=lambda tile_m: _cost(shape, tile_m))


def direct(shape: ExpertsShape, device: Device) -> tuple[DirectDecision, float] | None:
    """The two launches without sorting and how long they should take, in seconds; None where none fits.

    The products are estimated as dense ones of a row: as wide as all pairs together, and as long as all
    experts of a row. GPUs without ``wgmma`` have no other way, however slow it is for many rows.
    """
    if device.has_warpgroups and shape.pairs > _DIRECT_PAIRS:
        return None
    gate_up, down = (shape.product(gated=gated) for gated in (True, False))
    wide = replace(gate_up, m=1, n=gate_up.n * shape.pairs)
    long = replace(down, m=1, n=down.n * shape.m, k=down.k * shape.top)
    best: list[tuple[float, StreamConfig]] = []
    for problem, slots in ((wide, 1), (long, shape.top)):
        timed = [
            (stream.estimate(problem, device, config)[0], config)
            for config in stream.candidates(problem, device)
            if config.parts % slots == 0
        ]
        if not timed:
            return None
        best.append(min(timed, key=lambda pair: pair[0]))
    seconds = best[0][0] + best[1][0]
    reason = (
        f"{shape.pairs} pairs as they come: {best[0][1].tile_n} columns, K in {best[0][1].parts} parts; "
        f"{best[1][1].tile_n} columns, K in {best[1][1].parts} parts; {1e6 * seconds:.1f} us expected"
    )
    configs = [
        DirectConfig(config, gated, shape.top) for (_, config), gated in zip(best, (True, False), strict=True)
    ]
    return DirectDecision(configs[0], configs[1], reason), seconds


def sorted_seconds(shape: ExpertsShape, device: Device) -> float:
    """About how long the sorted launches take: what is fixed, and the bytes of the experts touched."""
    touched, _ = _expected_tiles(shape.pairs / shape.experts, 1)
    gate_up, down = (shape.product(gated=gated) for gated in (True, False))
    expert = gate_up.n * gate_up.k * gate_up.bytes_per_weight + down.n * down.k * down.bytes_per_weight
    return _SORTED_FIXED + touched * shape.experts * expert / (_SORTED_BANDWIDTH * device.bandwidth)


def grouped_decision(
    shape: ExpertsShape, device: Device, tile_m: int, columns: Columns
) -> SortedDecision | None:
    """Both products with tiles of ``tile_m`` rows; None where one does not fit."""
    gate_up, down = (grouped(shape, device, tile_m, columns, gated=gated) for gated in (True, False))
    if gate_up is None or down is None:
        return None
    reason = (
        f"tiles of {tile_m} rows for {shape.pairs / shape.experts:.1f} rows an expert, {columns.warpgroups} "
        f"x {64 * columns.words} columns, {columns.blocks} blocks a multiprocessor"
    )
    return SortedDecision(gate_up, down, reason)


def decisions(shape: ExpertsShape, device: Device) -> list[ExpertsDecision]:
    """Every variant worth measuring: without sorting, and all columns with the better heights of tiles."""
    found: list[ExpertsDecision] = []
    without = direct(shape, device)
    if without is not None:
        found.append(without[0])
    heights = _heights(shape)
    for tile_m in heights:
        if _cost(shape, tile_m) > _WORTH_MEASURING * _cost(shape, heights[0]):
            continue
        for columns in (*_COLUMNS_FEW, *_COLUMNS_MANY):
            chosen = grouped_decision(shape, device, tile_m, columns)
            if chosen is not None:
                found.append(chosen)
    return found


def grouped(
    shape: ExpertsShape, device: Device, tile_m: int, columns: Columns, *, gated: bool
) -> GroupedConfig | None:
    """The variant with tiles of ``tile_m`` rows and as deep a ring as fits; None where registers don't."""
    problem = shape.product(gated=gated)
    words, side_by_side, blocks = columns
    # Single blocks of columns are transposed 16 rows at a time; and four words with zero points and scales of
    # all of K spill.
    if (gated and words == 2 and tile_m % 16) or (words == 4 and problem.zeros and problem.quant_group == 0):
        return None
    if tile_m > _ROWS_MOST[columns]:
        return None
    tile = WarpgroupConfig(tile_m, words, side_by_side, 1, _ROWS, 1, 0, blocks, _UNLIMITED)
    # Without stages it has the rest of a block's memory.
    config = GroupedConfig(tile, gated, device.multiprocessors * blocks)
    room = device.shared_bytes // blocks - _RESERVED - config.shared_bytes(problem)
    stages = min(_STAGES_MOST, room // stage_bytes(problem, tile_m, tile.tile_n, _ROWS))
    return replace(config, tile=replace(tile, stages=stages)) if stages > 1 else None


def _cost(shape: ExpertsShape, tile_m: int) -> float:
    """Cycles of a chunk for all experts that are touched, if rows choose them evenly."""
    mean = shape.pairs / shape.experts
    touched, tiles = _expected_tiles(mean, tile_m)
    memory = touched * _MEMORY
    products = tiles * max(_UNPACKING, _CHUNK + _ROW * tile_m)
    return float((memory**4 + products**4) ** 0.25)


def _expected_tiles(mean: float, tile_m: int) -> tuple[float, float]:
    """Of one expert whose rows are Poisson distributed: the chance of any, and the expected tiles."""
    spread = math.sqrt(mean)
    first, last = max(0, int(mean - 6 * spread)), int(mean + 6 * spread) + 2
    chances = [math.exp(c * math.log(mean) - mean - math.lgamma(c + 1)) for c in range(first, last)]
    touched = 1 - math.exp(-mean)
    return touched, sum(chance * -(-(first + i) // tile_m) for i, chance in enumerate(chances))
