"""Which kernels and configurations run a routed layer, and why: decided without a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.contract.device import Device, registers_of_a_thread
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT8
from marlinq.kernels.experts.configurations import (
    DirectConfig,
    DirectDecision,
    ExpertsDecision,
    ExpertsShape,
    GroupedConfig,
    SortedDecision,
)
from marlinq.kernels.variants import stream
from marlinq.kernels.variants.stages import stage_bytes
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig

MOST_EXPERTS = 512
"""Experts that ``cuda/experts/route.cuh`` sorts."""


class Columns(NamedTuple):
    """How a grouped product divides the columns.

    Attributes:
        words: 16-column blocks of a warp, 2 or 4.
        warpgroups: warpgroups of a block, side by side in N.
        blocks: blocks a multiprocessor.
    """

    words: int
    warpgroups: int
    blocks: int


_TILES_M = (8, 16, 32, 48, 64, 80, 96, 112, 128)
# Rows of the largest tile whose kernel does not spill registers (tests/kernels/test_experts_choose.py).
_ROWS_MOST = {
    Columns(4, 1, 2): 8,
    Columns(2, 1, 2): 64,
    Columns(4, 2, 1): 32,
    Columns(2, 2, 1): 128,
}
_ROWS = 8  # rows of 16 channels in a chunk
_STAGES_MOST = 12  # stages of a ring
# :func:`decisions` lists sorted configurations up to this multiple of the least estimate.
_WORTH_MEASURING = 1.4


@dataclass(frozen=True)
class SortedCosts:
    """Fitted constants of the estimate for sorted pairs, from times measured on an H200.

    Times: ``lab/kernels/experts_parts.py --variants``, four layers, 1 to 4096 rows.

    Attributes:
        fixed: seconds of a layer's four or five launches without any work.
        gathered: seconds per element of sorted activations to gather it and to add it to the result.
        chunk: cycles a warpgroup needs per chunk, whatever it multiplies.
        word: cycles a warpgroup adds per row of 16 channels and 16 columns of a warp.
        issue: issue cycles of a multiprocessor's schedulers per word of a warp.
        end: cycles at a tile's end per 64 rows of the tile and 16 columns of a warp.
        saved_by_local_sort: seconds of ``fixed`` saved when blocks sort pairs and no sort kernel is launched.
    """

    fixed: float = 1.08e-05
    gathered: float = 1.61e-12
    chunk: float = 323.0
    word: float = 30.0
    issue: float = 16.0
    end: float = 335.0
    saved_by_local_sort: float = 1.2e-06


COSTS = SortedCosts()
_UNLIMITED = 1 << 30
# Local sort inside each block: at most 128 pairs (measured: no gain at 256), one thread per expert, hence at
# most 256 experts, and tiles of 8 rows, since rows are copied one by one.
_LOCAL_PAIRS, _LOCAL_EXPERTS, _LOCAL_TILE = 128, 256, 8
# Largest number of pairs for the variant of two launches without a sort: a block compares the experts of at
# most 256 pairs. With more pairs several blocks would read the same expert.
_DIRECT_PAIRS = 256
# Activations multiplied at once in a shared product: pairs of one expert (gate and up), or rows of the batch
# (down).
_COLUMNS = 8
# Cost of reading an expert again, from L2, relative to reading it first; and share of a product's time that
# its instructions take, wherever the words come from.
_AGAIN, _INSTRUCTIONS = 0.25, 0.82
# Time of a product of pairs that share an expert, as a multiple of a dense product's: blocks first compare
# the experts of all pairs.
_TOGETHER = 1.2
# Seconds that each expert adds to the down product, which sums over all experts of a row.
_SEGMENT = 1.5e-7
# (warps side by side, parts of K) of a block where pairs share experts.
_SHARED_SHAPES = ((1, 4), (1, 8), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2), (6, 1), (7, 1))
# Bytes of weights in flight to a multiprocessor.
_IN_FLIGHT = 100_000
# Registers a thread needs to avoid spills where pairs share experts (tests/kernels/test_experts_choose.py).
_SHARED_REGISTERS = 168
# Bytes of shared memory for barriers and for the driver, per block.
_RESERVED = 1280


@lru_cache(maxsize=4096)
def decide_experts(shape: ExpertsShape, device: Device) -> ExpertsDecision:
    """The launches for ``shape`` with the least estimate on ``device``.

    Raises:
        UnsupportedError: more than :data:`MOST_EXPERTS` experts, or no configuration fits the layer.
    """
    unsorted = direct(shape, device)
    variants = sorted_variants(shape, device)
    if unsorted is not None and (not variants or unsorted[1] < variants[0][0]):
        return unsorted[0]
    if variants:
        return variants[0][1]
    if device.has_warpgroups and shape.experts > MOST_EXPERTS:
        raise UnsupportedError(f"{shape.experts} experts on one GPU: at most {MOST_EXPERTS} are sorted")
    raise UnsupportedError(
        f"{shape.top} experts a row with {shape.granularity.describe()}: "
        f"no variant fits {device.architecture}"
    )


def decide_with_shared(
    shape: ExpertsShape, count: int, seconds: float, device: Device
) -> DirectDecision | None:
    """Launches for ``shape`` and a shared expert, stored as ``count`` further experts that every row takes.

    None where pairs are sorted, or where the routed experts alone and ``seconds`` of the shared expert's own
    products should take less time.
    """
    alone = direct(shape, device)
    joined = direct(replace(shape, top=shape.top + count, experts=shape.experts + count), device)
    if alone is None or joined is None or decide_experts(shape, device) != alone[0]:
        return None
    return joined[0] if joined[1] < alone[1] + seconds else None


def direct(shape: ExpertsShape, device: Device) -> tuple[DirectDecision, float] | None:
    """The best decision without sorting and its estimated seconds; None where none fits.

    On GPUs without ``wgmma`` this is the only way, also for many rows.
    """
    if device.has_warpgroups and shape.pairs > _DIRECT_PAIRS:
        return None
    best = [
        min(timed_configs, key=lambda timed: timed[0])
        for gated in (True, False)
        if (timed_configs := [*_alone(shape, device, gated=gated), *_shared(shape, device, gated=gated)])
    ]
    return _direct_decision(shape, best) if len(best) == 2 else None


def direct_variants(shape: ExpertsShape, device: Device) -> list[tuple[float, DirectDecision]]:
    """Estimated seconds and decision, the best of each way without sorting (pairs alone, or sharing
    experts)."""
    if device.has_warpgroups and shape.pairs > _DIRECT_PAIRS:
        return []
    ways = []
    for way in (_alone, _shared):
        timed_configs = [list(way(shape, device, gated=gated)) for gated in (True, False)]
        if all(timed_configs):
            ways.append([min(timed, key=lambda one: one[0]) for timed in timed_configs])
    return [(seconds, decision) for decision, seconds in (_direct_decision(shape, best) for best in ways)]


def _direct_decision(
    shape: ExpertsShape, best: list[tuple[float, DirectConfig]]
) -> tuple[DirectDecision, float]:
    seconds = sum(time for time, _ in best)
    ways = "; ".join(
        f"{f'{config.columns} together' if config.columns else 'alone'}, {config.tile.tile_n} columns, "
        f"K in {config.tile.parts} parts, {config.tile.min_blocks} blocks a multiprocessor"
        for _, config in best
    )
    reason = f"{shape.pairs} pairs as they come: {ways}; {1e6 * seconds:.1f} us expected"
    return DirectDecision(best[0][1], best[1][1], reason), seconds


def _alone(shape: ExpertsShape, device: Device, *, gated: bool) -> Iterator[tuple[float, DirectConfig]]:
    """Estimated seconds and configurations where each pair (gate and up) or row (down) is a product alone.

    Estimated as a dense product of one row: N is that of all pairs together (gate and up), or K that of all
    experts of a row (down). Reading an expert again costs :data:`_AGAIN` of reading it first, but no product
    takes less than its instructions (:data:`_INSTRUCTIONS`).
    """
    one = shape.product(gated=gated)
    wide, slots = replace(one, m=1, n=one.n * shape.pairs), 1
    if not gated:
        wide, slots = replace(one, m=1, n=one.n * shape.m, k=one.k * shape.top), shape.top
    share = _touched(shape, shape.m) / shape.pairs
    for config in stream.candidates(wide, device):
        if config.parts % slots == 0:
            seconds, _ = stream.estimate(wide, device, config)
            config_of_pairs = DirectConfig(config, gated, shape.top, biased=shape.biased)
            yield seconds * max(_INSTRUCTIONS, share + _AGAIN * (1 - share)), config_of_pairs


def _shared(shape: ExpertsShape, device: Device, *, gated: bool) -> Iterator[tuple[float, DirectConfig]]:
    """Estimated seconds and configurations where pairs of one expert are multiplied together.

    Estimated as a dense product of up to eight rows: N is that of all experts expected to be chosen (gate and
    up), or K that of all experts of eight rows (down). Reading an expert again costs :data:`_AGAIN`.
    """
    compared = shape.pairs if gated else _COLUMNS * shape.top
    if shape.m == 1 or compared > _DIRECT_PAIRS:
        return
    columns = next(count for count in (2, 4, _COLUMNS) if count >= min(shape.m, _COLUMNS))
    one = shape.product(gated=gated)
    touched = _touched(shape, shape.m)
    if gated:
        groups = shape.experts * _expected_tiles(shape.pairs / shape.experts, columns)[1]
        wide, share = replace(one, m=2, n=one.n * max(1, round(groups))), touched / groups
        segments = 0.0
    else:
        tiles, of_tile = -(-shape.m // columns), _touched(shape, min(shape.m, columns))
        wide = replace(one, m=2, n=one.n * tiles, k=one.k * max(1, round(of_tile)))
        share, segments = touched / (tiles * of_tile), of_tile
    share = min(1.0, share)
    chunks = wide.k // 128
    # The kernel adds sums of two rows (32 channels) before it scales them, so groups of 16 scale weights.
    scale_sums = shape.granularity.channels != 16
    for (warps_n, warps_k), blocks in itertools.product(_SHARED_SHAPES, (1, 2, 3)):
        if registers_of_a_thread(warps_n * warps_k, blocks) < _SHARED_REGISTERS:
            continue
        for cluster in device.cluster_sizes:
            if cluster * warps_k > max(chunks, 4):
                continue
            tile = StreamConfig(warps_n, warps_k, 1, 8, scale_sums, cluster, 0, blocks)
            config = DirectConfig(tile, gated, shape.top, columns, shape.biased)
            # Stages that fit, but no more than are useful.
            room = (device.shared_bytes + 1024) // blocks - 1024
            fitting = (room - config.shared_bytes(one)) // config.stage_bytes(one)
            useful = -(-_IN_FLIGHT // (blocks * config.stage_bytes(one))) + 1
            stages = min(fitting, max(3, useful), 8)
            if stages < 3:
                continue
            staged = replace(config, tile=replace(tile, stages=stages))
            seconds, _ = stream.estimate(wide, device, staged.tile)
            yield _TOGETHER * seconds * (share + _AGAIN * (1 - share)) + segments * _SEGMENT, staged


def _touched(shape: ExpertsShape, rows: int) -> float:
    """Mean number of this GPU's experts that ``rows`` rows choose, if all experts are equally likely."""
    return shape.experts * (1 - (1 - min(1.0, shape.top / shape.experts)) ** rows)


def sorted_variants(shape: ExpertsShape, device: Device) -> list[tuple[float, SortedDecision]]:
    """Estimated seconds and decision of every way with sorting that fits, the fastest first."""
    if not device.has_warpgroups or shape.experts > MOST_EXPERTS:
        return []
    timed = []
    for columns, tile_m, local_sort in itertools.product(_ROWS_MOST, _TILES_M, (False, True)):
        few = shape.pairs <= _LOCAL_PAIRS and shape.experts <= _LOCAL_EXPERTS
        if local_sort and (tile_m > _LOCAL_TILE or not few):
            continue
        gate_up, down = (
            grouped(shape, device, tile_m, columns, gated=gated, local_sort=local_sort)
            for gated in (True, False)
        )
        if gate_up is None or down is None:
            continue
        seconds = sorted_seconds(shape, device, tile_m, columns) - COSTS.saved_by_local_sort * local_sort
        reason = (
            f"{'sorted by every block, ' if local_sort else ''}"
            f"tiles of {tile_m} rows for {shape.pairs / shape.experts:.1f} rows an expert, "
            f"{columns.warpgroups} x {64 * columns.words} columns, {columns.blocks} blocks a multiprocessor; "
            f"{1e6 * seconds:.1f} us expected"
        )
        timed.append((seconds, SortedDecision(gate_up, down, reason)))
    return sorted(timed, key=lambda pair: pair[0])


def sorted_seconds(shape: ExpertsShape, device: Device, tile_m: int, columns: Columns) -> float:
    """Estimated seconds of all launches with such tiles, if all experts are equally likely."""
    costs = COSTS
    touched, tiles = _expected_tiles(shape.pairs / shape.experts, tile_m)
    words, warpgroups, blocks = columns
    slots = device.multiprocessors * blocks
    seconds = costs.fixed + costs.gathered * shape.pairs * shape.hidden
    for gated in (True, False):
        problem = shape.product(gated=gated)
        tile_n = 64 * words * warpgroups
        waves = math.ceil(shape.experts * tiles * -(-problem.n // tile_n) / slots)
        # Tiles of the same expert read its words from device memory once.
        weights = tile_n * 16 * _ROWS * problem.bytes_per_weight * touched / tiles
        memory = slots * weights / device.bandwidth
        alone = costs.chunk + _ROWS * words * costs.word
        together = blocks * warpgroups * _ROWS * words * (costs.issue + tile_m / 2)
        chunk = (memory**4 + (alone / device.clock) ** 4 + (together / device.clock) ** 4) ** 0.25
        end = costs.end * (0.3 + words * tile_m / 64) / device.clock
        seconds += waves * (-(-problem.k // (16 * _ROWS)) * chunk + end)
    return seconds


def decisions(shape: ExpertsShape, device: Device) -> list[ExpertsDecision]:
    """Decisions worth measuring: both without sorting, and those with sorting whose estimate is near the
    least."""
    unsorted: list[ExpertsDecision] = [decision for _, decision in direct_variants(shape, device)]
    variants = sorted_variants(shape, device)
    return [
        *unsorted,
        *(decision for seconds, decision in variants if seconds < _WORTH_MEASURING * variants[0][0]),
    ]


def grouped(
    shape: ExpertsShape,
    device: Device,
    tile_m: int,
    columns: Columns,
    *,
    gated: bool,
    local_sort: bool = False,
) -> GroupedConfig | None:
    """The configuration with tiles of ``tile_m`` rows and as many stages as fit; None where registers don't
    fit.

    ``local_sort``: blocks sort pairs themselves; at most 128 pairs and, with one thread each, 256 experts.
    """
    problem = shape.product(gated=gated)
    words, side_by_side, blocks = columns
    # Gate and up leave one block of 16 columns to transpose, 16 rows at a time. Four words with zero points
    # and scales of all of K spill.
    if (gated and words == 2 and tile_m % 16) or (words == 4 and problem.zeros and problem.quant_group == 0):
        return None
    # 8-bit integers with zero points take 125 of 128 registers in bfloat16, in groups of 64 more than 128.
    if blocks == 2 and words == 4 and problem.format == INT8 and problem.zeros and problem.bfloat16:
        return None
    # Gated 4-bit floats, and 8-bit ones in groups of 32, spill 12 bytes in tiles of 96 rows with GELU, but
    # not in tiles of 80 or 112.
    spilling = problem.format == E2M1 or (problem.format == E4M3 and problem.quant_group == 32)
    if gated and spilling and tile_m == 96:
        return None
    if tile_m > _ROWS_MOST[columns]:
        return None
    tile = WarpgroupConfig(tile_m, words, side_by_side, 1, _ROWS, 1, 0, blocks, _UNLIMITED)
    # With no stages yet, ``shared_bytes`` is all that a block needs beside its ring.
    config = GroupedConfig(tile, gated, shape.biased, device.multiprocessors * blocks)
    if local_sort:
        config = replace(config, local_pairs=at_least(shape.pairs), experts=at_least(shape.experts))
    room = device.shared_bytes // blocks - _RESERVED - config.shared_bytes(problem) - config.sorting_bytes
    stages = min(_STAGES_MOST, room // stage_bytes(problem, tile_m, tile.tile_n, _ROWS))
    return replace(config, tile=replace(tile, stages=stages)) if stages > 1 else None


def at_least(count: int) -> int:
    """``count`` rounded up to a power of two, at least 32, so that models share compiled kernels."""
    return max(32, 1 << (count - 1).bit_length())


def _expected_tiles(mean: float, tile_m: int) -> tuple[float, float]:
    """(probability of any row, mean number of tiles) of an expert whose number of rows has a Poisson
    distribution with this mean."""
    spread = math.sqrt(mean)
    first, last = max(0, int(mean - 6 * spread)), int(mean + 6 * spread) + 2
    chances = [math.exp(c * math.log(mean) - mean - math.lgamma(c + 1)) for c in range(first, last)]
    touched = 1 - math.exp(-mean)
    return touched, sum(chance * -(-(first + i) // tile_m) for i, chance in enumerate(chances))
