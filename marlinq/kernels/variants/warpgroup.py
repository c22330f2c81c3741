"""Candidate configurations of the warpgroup kernel (``cuda/kernels/warpgroup.cuh``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from marlinq.kernels.contract.configuration import Variant
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.variants.stages import stage_bytes
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from marlinq.kernels.variants.warpgroup_costs import estimate

# Rows from which the kernel is a candidate. On an H200 it was slower than the others on all layers at 16 rows
# and the fastest from 33 on; its estimate is the least from 17 on.
_LEAST_BATCH = 9
# Rows from which batches that are no power of two share the few configurations of :func:`common`. Without
# sharing, a model would compile about a hundred. (Servers pad batches to powers of two.)
_COMMON_LEAST = 33
_TILES_M = (8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176)
# Batches of this many tiles and more take tiles of at most 128 rows: on an H200, at 2048 and 4096 rows, 0.98
# to 1.01 of the time of 144 and 160. Larger tiles help only where they save one of few waves.
_MANY_TILES, _MANY_TILES_MOST = 8, 128
# Batches that are powers of two, from 256 rows on, take these tiles; no other had the least estimate.
_POWER_ROWS, _POWER_TILES_M = 256, (64, 96, 128)
# Tiles of 176 rows with several warpgroups side by side are used only where all tiles fit in one wave:
# measured slower by 10 % and more in several waves.
_FULL_TILE = 176
# (words, warpgroups_n, parts_k): the pairs (rows of a chunk, blocks a multiprocessor) considered with them.
# Of 4,000 random layers, batches and formats on three GPUs, hardly one chose anything else.
_SHAPES = {
    (4, 1, 2): ((8, 1),),
    (4, 1, 3): ((8, 1),),
    (4, 2, 1): ((8, 1),),
    (2, 1, 1): ((8, 2),),
    (2, 1, 2): ((8, 1), (4, 1)),
    (2, 1, 3): ((8, 1),),
    (2, 2, 1): ((8, 1), (4, 1)),
    (2, 3, 1): ((8, 1),),
    (1, 1, 2): ((8, 1), (8, 2), (4, 1)),
    (1, 1, 3): ((8, 1), (4, 1)),
    (1, 2, 1): ((8, 1), (8, 2)),
    (1, 3, 1): ((8, 1), (4, 1)),
}
# (tile_m, words, warpgroups_n, parts_k, cluster, stream-K): the configurations for batches that are no powers
# of two. ``lab/kernels/choose_common.py`` chose ten; the two that saved least were dropped. Estimated times
# are 4 % above the best configuration's on average, 44 % at worst.
_COMMON = (
    (64, 2, 2, 1, 1, True),
    (96, 2, 2, 1, 1, True),
    (48, 1, 3, 1, 1, True),
    (80, 1, 3, 1, 1, True),
    (112, 2, 2, 1, 1, True),
    (64, 2, 1, 2, 2, False),
    (128, 2, 2, 1, 1, True),
    (48, 1, 1, 3, 2, False),
)
_MAX_STAGES = 12
# Clusters of more blocks than this are considered only where all of them run at once: otherwise never faster.
# Clusters of two can fill the last wave.
_ALWAYS = 2


def candidates(problem: Problem, device: Device, batch_invariant: bool = False) -> Iterator[WarpgroupConfig]:
    """The configurations worth estimating, all of which fit the device's registers and shared memory.

    With ``batch_invariant`` only those whose order of summation is the same for every M, and also large
    clusters that don't all run at once.
    """
    if not device.has_warpgroups:
        return
    # For each number of tiles that the batch is split into, the smallest tile.
    smallest = next((tile for tile in _TILES_M if tile >= problem.m), _TILES_M[-1])
    tiles_m: dict[int, int] = {}
    heights = _TILES_M if problem.m.bit_count() > 1 or problem.m < _POWER_ROWS else _POWER_TILES_M
    for tile_m in (tile for tile in heights if min(smallest, 64) <= tile <= smallest):
        count = -(-problem.m // tile_m)
        if count < _MANY_TILES or tile_m <= _MANY_TILES_MOST:
            tiles_m.setdefault(count, tile_m)
    variants = [(shape, *beside) for shape, listed in _SHAPES.items() for beside in listed]
    for count, tile_m in tiles_m.items():
        # A second block on a multiprocessor helps only batches of one tile.
        most = 2 if count == 1 else 1
        for (words, warpgroups_n, parts_k), rows, blocks in variants:
            if blocks > most:
                continue
            # One word: the epilogue stores 16 batch rows at a time. Four words: zero points and scales of all
            # of K spill.
            if (words == 1 and tile_m % 16) or (words == 4 and problem.zeros and problem.quant_group == 0):
                continue
            tiles = count * -(-problem.n // (warpgroups_n * words * 64))
            if tile_m == _FULL_TILE and warpgroups_n > 1 and tiles > device.multiprocessors:
                continue
            for cluster in device.cluster_sizes:
                if cluster * parts_k > -(-problem.k // (16 * rows)):
                    continue
                if not (batch_invariant or cluster <= _ALWAYS or device.runs_at_once(tiles, cluster, blocks)):
                    continue
                config = _deepest(
                    problem, device, tile_m, words, warpgroups_n, parts_k, rows, cluster, blocks
                )
                if config is None:
                    continue
                yield config
                split_evenly = replace(config, stream_k=True)
                if not batch_invariant and _worth_stream_k(problem, split_evenly):
                    yield split_evenly


def common(problem: Problem, device: Device) -> Iterator[WarpgroupConfig]:
    """The few configurations for any batch of more than 32 rows, as far as they fit the device."""
    if not device.has_warpgroups:
        return
    for tile_m, words, warpgroups_n, parts_k, cluster, stream_k in _COMMON:
        config = _deepest(problem, device, tile_m, words, warpgroups_n, parts_k, 8, cluster, 1)
        if config is None or cluster * parts_k > config.chunks(problem):
            continue
        if cluster > _ALWAYS and not device.runs_at_once(config.tiles(problem), cluster, 1):
            continue
        split_evenly = replace(config, stream_k=True)
        yield split_evenly if stream_k and _worth_stream_k(problem, split_evenly) else config


def _worth_stream_k(problem: Problem, config: WarpgroupConfig) -> bool:
    """Whether stream-K is possible, and the tiles don't make full waves anyway."""
    if config.joins_sums(problem) or config.grid(problem) == 1 or not config.fits_registers(problem):
        return False
    # With two blocks a multiprocessor, stream-K never measured faster than other splits.
    if config.min_blocks > 1:
        return False
    return config.tiles(problem) % config.most_blocks != 0


def _deepest(
    problem: Problem,
    device: Device,
    tile_m: int,
    words: int,
    warpgroups_n: int,
    parts_k: int,
    rows: int,
    cluster: int,
    min_blocks: int,
) -> WarpgroupConfig | None:
    """The configuration with as many stages as fit in shared memory; None if not enough for its parts do."""
    # NVRTC 13.0 puts fragments of this shape into local memory.
    if words == 1 and problem.bfloat16 and problem.quant_group == 32 and not problem.format.fuses:
        return None
    # Of sparse kernels, it spills registers with 64 columns a warp, 64 rows and groups of 32.
    if problem.format.sparsity is not None and words == 4 and tile_m == 64 and problem.quant_group == 32:
        return None
    most = device.multiprocessors * min_blocks
    # 1024 bytes a block: barriers, and the shared memory that the driver reserves.
    room = device.shared_bytes // min_blocks - 1024
    # A part waits for its next chunk two rows ahead, and gives one back behind the next one's first row.
    shallowest = (3 if 16 * rows == 2 * problem.format.row_channels else 2) * parts_k
    config = WarpgroupConfig(
        tile_m, words, warpgroups_n, parts_k, rows, cluster, shallowest, min_blocks, most
    )
    if not config.fits_registers(problem) or config.shared_bytes(problem) > room:
        return None
    ring = room - 1024 - config.bytes_beside_ring(problem)
    stages = min(_MAX_STAGES, ring // stage_bytes(problem, tile_m, config.tile_n, rows))
    # Each part of K has the same number of stages.
    return replace(config, stages=stages // parts_k * parts_k)


def _suits(problem: Problem, device: Device, *, dependent: bool) -> bool:
    return problem.m >= _LEAST_BATCH and device.has_warpgroups


def _common(problem: Problem, device: Device) -> Iterator[WarpgroupConfig]:
    if problem.m >= _COMMON_LEAST and problem.m.bit_count() > 1:
        yield from common(problem, device)


WARPGROUP = Variant(
    WarpgroupConfig,
    runs_on=lambda device: device.has_warpgroups,
    suits=_suits,
    candidates=candidates,
    estimate=estimate,
    common_candidates=_common,
)
"""The warpgroup kernel: all but the smallest batches, on GPUs with ``wgmma``."""
