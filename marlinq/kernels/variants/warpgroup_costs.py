"""Expected seconds of the warpgroup kernel (``cuda/kernels/warpgroup.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from marlinq.kernels.contract.device import Device, Load
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.variants.costs import PHYSICS, overlapped, resident_blocks, round_trip, streaming_seconds
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig

# Instructions that scale one operand fragment; and those that unpack, subtract and scale eight codes at once.
_SCALE, _FUSED = 4, 10
# Time of a sparse product, as a multiple of a dense one's with as many kept channels: it reads twice as many
# activations from shared memory (docs/kernels.md, "2:4 sparse weights"). Fitted to 32 products on an H200.
_SPARSE_PRODUCT = 1.38
_MULTIPLICATIONS = 2048  # 16-bit multiply-adds a cycle of a multiprocessor's tensor cores


@dataclass(frozen=True)
class WarpgroupCosts:
    """Fitted constants of the estimate, from times measured on an H200 (``lab/kernels/fit_costs.py``).

    Cycles are those of :attr:`Device.clock`. A row is 16 channels of a warpgroup's columns, a chunk the rows
    that it takes at a time, a product one ``wgmma`` of 64 columns.

    Attributes:
        row: cycles a warpgroup needs per row to wait, fetch and issue, dequantisation excluded.
        fragment: cycles a warpgroup needs to dequantise the operand A of one product while no other warpgroup
            runs.
        issue: cycles of a multiprocessor's schedulers per instruction of each warp that dequantises.
        exposed: share of a product's time during which its warpgroup can't dequantise the next operand.
        chunk: cycles a warpgroup needs to wait for a chunk's stage and to release it.
        sharing: cycles that each further warpgroup of the same chunk adds to ``chunk``.
        collision: share of a queue that a newcomer waits for
            (:func:`marlinq.kernels.variants.costs.round_trip`).
        tile: seconds at the end of an unsplit tile, unless the producer warpgroup stores it during the next.
        turn: seconds a thread waits for a read from shared memory of its cluster, once per four sums.
        handover: seconds of a stream-K launch besides its chunks and the transfer of sums through L2.
        scattered: share of the time of :func:`_displaced` that is added: reads of stream-K tiles that miss L2
            since neighbours work elsewhere in K.
        sharpness: exponent p of the p-norm that combines the shares of a launch's time (p = 1: they add; p
            large: the longest counts).
    """

    row: float = 22
    fragment: float = 1.7
    issue: float = 1.6
    exposed: float = 0.16
    chunk: float = 350
    sharing: float = 10
    collision: float = 1.6
    tile: float = 1.3e-06
    turn: float = 6.9e-08
    handover: float = 8.5e-07
    scattered: float = 0.082
    sharpness: float = 4


COSTS = WarpgroupCosts()


def _displaced(
    problem: Problem, device: Device, config: WarpgroupConfig, weights: float, activations: float
) -> float:
    """Seconds of device memory for operands of stream-K tiles that miss L2.

    Blocks that work on whole tiles side by side read the same words at about the same time. Blocks of
    stream-K start at different places in K, so that one finds in L2 only the bytes that L2 still holds from
    another.

    Args:
        problem: the product.
        device: GPU with the size of L2.
        config: a stream-K configuration.
        weights: bytes of weights that one tile reads.
        activations: bytes of activations that one tile reads.
    """
    tiles, grid = config.tiles(problem), config.grid(problem)
    dealt = tiles - max(tiles // grid - 1, 0) * grid
    rows = -(-problem.m // config.tile_m)
    distinct = activations * min(rows, dealt) + weights * -(-dealt // rows)
    # L2 has two halves, and each holds a copy of the bytes its multiprocessors read.
    missed = max(0.0, 1 - device.cache_bytes / 2 / distinct)
    return missed * (dealt * (weights + activations) - distinct) / device.bandwidth


def estimate(
    problem: Problem, device: Device, config: WarpgroupConfig, costs: WarpgroupCosts = COSTS
) -> tuple[float, str]:
    """Seconds of a launch, and what the busiest multiprocessor spends most of them on."""
    chunk = 16 * config.rows
    chunks = -(-problem.k // chunk)
    split = config.joins_sums(problem)
    resident = config.min_blocks
    if split:
        resident = resident_blocks(problem, device, config, config.registers(problem))
    fed = -(-chunks // config.cluster)
    turns = -(-fed // config.parts_k)  # chunks of the longest part
    channels = chunks / config.cluster * chunk
    weights = channels * config.tile_n * problem.bytes_per_weight
    activations = channels * config.tile_m * 2
    read = weights + activations
    # Tiles of the same columns share their weights, which come from device memory once per 1,024 batch rows.
    own = weights / min(-(-problem.m // config.tile_m), max(1, 1024 // config.tile_m))
    batch = min(config.tile_m, problem.m)
    products = config.words
    rows = config.rows * problem.format.density  # stored rows of a chunk
    # Each product is 64 columns x 16 kept channels x TILE_M rows, also where the batch has fewer rows.
    columns = products * 64 * 16 * config.tile_m / _MULTIPLICATIONS / device.clock
    if problem.format.sparsity is not None:
        columns *= _SPARSE_PRODUCT
    multiplied = columns * costs.exposed
    scaling = config.scaling(problem)
    scaled_quant_groups = problem.quant_group != 0 and scaling == "SUMS"
    instructions: float = problem.format.unpack[problem.bfloat16]
    if scaled_quant_groups:
        instructions += config.tile_m / 2 / rows
    elif scaling == "WEIGHTS":
        instructions += _SCALE
    elif scaling == "FUSED":
        instructions = _FUSED
    dequantised = products * instructions * costs.issue / device.clock
    waited = (costs.row + products * costs.fragment) / device.clock
    handed = (costs.chunk + costs.sharing * (config.warpgroups_n - 1)) / device.clock
    # Bytes of sums that are added at the end of a tile.
    ends = batch * config.tile_n * 4 * config.parts_k if split else 0
    meeting = PHYSICS.meeting(config.cluster)
    if config.cluster > 1 and not config.pushes:
        meeting += costs.turn * math.ceil(batch * config.tile_n / 4 / (config.cluster * config.threads))
    rate = PHYSICS.remote if config.cluster > 1 else PHYSICS.reduction
    seconds, busiest = PHYSICS.launch + PHYSICS.first_bytes * (not split), ""
    loads = device.loads(config.tiles(problem) * config.cluster, config.cluster, resident)
    if config.stream_k:
        loads = [Load(1, config.min_blocks, config.grid(problem))]
    for load in loads:
        count = load.blocks * config.warpgroups_n * min(config.parts_k, fed)
        row = round_trip(count, waited, (dequantised, multiplied), costs.collision)
        work = rows * row + handed
        times = streaming_seconds(device, load, own, read)
        times["requests"] = (
            turns * config.parts_k / config.stages * (PHYSICS.latency + work + read / fed / PHYSICS.port)
        )
        times["products"] = turns * work
        times["tensor cores"] = load.blocks * fed * config.warpgroups_n * rows * columns
        streamed, busiest = overlapped(times, costs.sharpness)
        begun = rows * (waited + dequantised + multiplied)
        last = begun + load.blocks * ends / rate
        last += PHYSICS.first_bytes + meeting if split else costs.tile
        earlier = begun if config.has_store_warps(problem) else last
        if config.stream_k:
            # Tiles a block computes (a fraction), and seconds for a tile's sums to go through L2. A tile
            # shared by several blocks is added up one block after the other.
            share = config.tiles(problem) / load.grid
            sums = config.tile_m * config.tile_n * 4 * device.multiprocessors / device.cache_bandwidth
            seconds += share * streamed + (math.ceil(share) - 1) * earlier + last
            seconds += costs.handover + load.blocks * (1 + max(1.0, 1 / share)) * sums
            seconds += costs.scattered * _displaced(problem, device, config, weights, activations)
        else:
            seconds += load.waves * (streamed + earlier)
    if not config.stream_k:
        # Each wave counted the end of a tile as ``earlier``; a block's last tile takes ``last``.
        seconds += last - earlier
    return seconds, busiest
