"""Host side of the bulk kernel (``cuda/kernels/bulk.cuh``): configurations, resources, estimated seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from marlinq.kernels.contract.arguments import MappedArguments
from marlinq.kernels.contract.configuration import ActivationBox, Variant
from marlinq.kernels.contract.device import Device, registers_of_a_thread
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.whole_rows import PUSHED_COLUMNS, MappedRowArguments, RowVariant
from marlinq.kernels.variants.costs import PHYSICS, SCHEDULERS, overlapped, resident_blocks, streaming_seconds
from marlinq.kernels.variants.pack_arguments import mapped_arguments
from marlinq.kernels.variants.stages import chunks_on_their_way, stage_bytes, weight_bytes
from marlinq.kernels.variants.tiles import (
    CODE_CLOSING,
    CODE_PRODUCTS,
    CODE_SHIFTS_BFLOAT16,
    WarpTiles,
    cluster_sizes,
    unpacking,
)

# Rows of its largest tile, hence of the largest batch it is considered for.
_MOST_BATCH = 16
# Registers a thread needs to avoid spills (tests/kernels/test_compile.py), by (BLOCKS_M, zero points); and
# further registers, by BLOCKS_M, when a chunk holds several groups.
_REGISTERS_NEEDED = {(1, False): 128, (1, True): 128, (2, False): 128, (2, True): 168}
_REGISTERS_OF_SHORT_QUANT_GROUPS = {1: 8, 2: 32}
# Issue cycles per stored row of sparse weights (32 channels) over those per dense row (16 channels).
# Fitted to 4 products on an H200.
_SPARSE_ROW = 1.4
_MAX_STAGES = 32
# Bytes of weights in flight to a multiprocessor whose rings have room for many more.
_ON_THEIR_WAY = 96 * 1024
_LEAST_STAGES = 3  # per part of K: with two, waiting and multiplying alternate instead of overlapping
# (warps side by side, parts of K): the pairs (rows of a chunk, blocks a multiprocessor) considered with them.
# Of 4,000 random layers, batches and formats on three GPUs, hardly one chose anything else.
_SHAPES = {
    (1, 4): ((8, 1), (8, 2), (4, 1), (4, 2), (4, 3)),
    (1, 6): ((8, 1),),
    (1, 8): ((8, 1),),
    (2, 2): ((8, 1), (8, 2), (8, 3), (4, 1), (4, 2), (4, 3)),
    (2, 3): ((8, 2), (4, 1), (4, 2)),
    (2, 4): ((8, 1), (4, 1)),
    (3, 2): ((8, 1), (8, 2), (4, 1), (4, 2)),
    (3, 3): ((8, 1), (4, 1)),
    (4, 1): ((8, 1), (8, 2), (8, 3), (4, 1), (4, 2), (4, 3)),
    (7, 1): ((8, 2), (4, 2)),
}


@dataclass(frozen=True)
class BulkCosts:
    """Fitted constants of the estimate, from times measured on an H200 (``lab/kernels/fit_costs.py``).

    Cycles are those of :attr:`Device.clock`. Instructions are counted in issue cycles of one scheduler. A row
    is 16 channels x 64 columns of weights, a chunk the rows that a warp takes at a time.

    Attributes:
        fill: seconds that a wave's first bytes arrive later than ``Physics.first_bytes``.
        crowding: increase of memory time, as a factor, per mebibyte that each multiprocessor requests ahead.
        row: issue cycles a warp needs per row where zero points are subtracted, products excluded.
        codes: issue cycles a warp needs per row where codes are multiplied without subtraction, products
            excluded.
        product: issue cycles of an ``mma.sync``.
        closing: issue cycles to scale sums, per block of eight batch rows and per quantisation group or
            chunk that ends.
        stalls: cycles a row takes, as a multiple of its issue cycles, for the only warp of a scheduler.
        copy: bytes a second at which one chunk arrives.
        producer: cycles of the TMA producer per chunk.
        cluster: seconds of a cluster's barriers.
        member: seconds that each block of a cluster adds to the barriers.
        sharpness: exponent p of the p-norm that combines the shares of a launch's time (p = 1: they add; p
            large: the longest counts).
    """

    fill: float = 4e-07
    crowding: float = 1.9
    row: float = 85
    codes: float = 35
    product: float = 3
    closing: float = 58
    stalls: float = 0.5
    copy: float = 4.6e10
    producer: float = 170
    cluster: float = 6e-08
    member: float = 6.1e-08
    sharpness: float = 12


COSTS = BulkCosts()


@dataclass(frozen=True)
class BulkConfig(WarpTiles):
    """The compile-time parameters of the bulk kernel; see its header comment."""

    warps_n: int
    warps_k: int
    blocks_m: int
    rows: int
    cluster: int
    stages: int
    min_blocks: int

    variant: ClassVar[str] = "bulk"
    header: ClassVar[str] = "kernels/bulk.cuh"
    function: ClassVar[str] = "w4a16_bulk"

    @property
    def threads(self) -> int:
        """Threads of a block, with those of the producer warp."""
        return 32 * (self.warps_n * self.warps_k + 1)

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of dynamic shared memory of a block: the aligned ring of stages, and room for sums
        received."""
        slots = -(-4 * self.warps_n // self.cluster)
        received = self.parts * slots * self.blocks_m * 512
        return self.stages * stage_bytes(problem, self.tile_m, self.tile_n, self.rows) + received + 1024

    def window(self, problem: Problem) -> int:
        """Chunks of a block in flight at once."""
        chunk = weight_bytes(problem, self.tile_n, self.rows)
        return chunks_on_their_way(chunk, self.stages, self.min_blocks, _ON_THEIR_WAY)

    def instantiation(self, problem: Problem) -> Instantiation:
        """Template and configuration struct to compile for ``problem``."""
        return Instantiation(
            self.header,
            self.function,
            (
                *problem.parameters,
                ("WARPS_N", self.warps_n),
                ("WARPS_K", self.warps_k),
                ("BLOCKS_M", self.blocks_m),
                ("ROWS", self.rows),
                ("CLUSTER", self.cluster),
                ("STAGES", self.stages),
                ("WINDOW", self.window(problem)),
                ("MIN_BLOCKS", self.min_blocks),
                ("SHARED_BYTES", self.shared_bytes(problem)),
            ),
        )

    def arguments(self, operands: ProductTensors, dependent: bool) -> MappedArguments:
        """The kernel's parameters."""
        return mapped_arguments(operands, self.tile_m, self.warps_n, self.rows, dependent)

    def activation_box(self, problem: Problem, stride: int) -> ActivationBox | None:
        """Tensor map with boxes of TILE_M rows."""
        return ActivationBox(problem.m, problem.k, stride, self.tile_m)

    def handover(self, problem: Problem) -> Handover | None:
        """None: the blocks of a tile are a cluster."""
        return None

    def activates(self, problem: Problem) -> bool:
        """True only without an activation: warps send sums to other blocks, so gate and up never meet."""
        return problem.activation is None

    def row_variant(self, problem: Problem, *, normed: bool, adds: bool) -> RowVariant | None:
        """The kernel that adds to the residual stream; None where the input has to be normalised."""
        if normed or (adds and problem.activation is not None):
            return None
        return RowVariant.of(
            self.instantiation(problem),
            "kernels/bulk_rows.cuh",
            PUSHED_COLUMNS,
            MappedRowArguments,
            normed=normed,
            adds=adds,
        )

    def order_of_sums(self, problem: Problem) -> tuple[object, ...]:
        """Cluster, parts, rows of a chunk, and whether raw codes are multiplied."""
        codes = self.blocks_m == 1 and problem.format.sums_codes
        return self.variant, self.cluster, self.parts, self.rows, codes


def candidates(problem: Problem, device: Device, batch_invariant: bool = False) -> Iterator[BulkConfig]:
    """The configurations worth estimating, all of which fit the device's registers and shared memory.

    With ``batch_invariant`` all of them multiply codes minus zero points, for every M, and clusters that
    don't all run at once are included. Without it such clusters are left out, since they are never fastest.
    """
    if not device.has_clusters:
        return
    blocks_m = 1 if problem.m <= 8 and not batch_invariant else 2
    variants = [(*shape, *beside) for shape, listed in _SHAPES.items() for beside in listed]
    for warps_n, warps_k, rows, blocks in variants:
        short_quant_groups = 0 < problem.quant_group < 16 * rows
        registers = _REGISTERS_NEEDED[blocks_m, problem.zeros]
        registers += short_quant_groups * _REGISTERS_OF_SHORT_QUANT_GROUPS[blocks_m]
        if registers_of_a_thread(warps_n * warps_k + 1, blocks) < registers:
            continue
        # 2048 bytes a block: barriers, and the shared memory that the driver reserves.
        room = device.shared_bytes // blocks - 2048
        single = BulkConfig(warps_n, warps_k, blocks_m, rows, 1, 0, blocks)
        stage = stage_bytes(problem, single.tile_m, single.tile_n, rows)
        for cluster in cluster_sizes(problem, device, single, blocks, every=batch_invariant):
            config = replace(single, cluster=cluster)
            # Each part of K has the same number of stages.
            stages = min(_MAX_STAGES, (room - config.shared_bytes(problem)) // stage) // warps_k * warps_k
            if stages >= _LEAST_STAGES * warps_k:
                yield replace(config, stages=stages)


def estimate(
    problem: Problem, device: Device, config: BulkConfig, costs: BulkCosts = COSTS
) -> tuple[float, str]:
    """Seconds of a launch, and what the busiest multiprocessor spends most of them on."""
    chunks = -(-problem.k // config.chunk)
    fed = -(-chunks // config.cluster)
    turns = -(-fed // config.warps_k)  # chunks of the longest part
    channels = chunks / config.cluster * config.chunk
    weights = channels * config.tile_n * problem.bytes_per_weight
    read = weights + channels * config.tile_m * 2
    own = weights / -(-problem.m // config.tile_m)
    closings = config.chunk / min(problem.quant_group or config.chunk, config.chunk)
    if config.blocks_m == 1 and problem.format.sums_codes:
        row = costs.codes + costs.product * CODE_PRODUCTS + CODE_SHIFTS_BFLOAT16 * problem.bfloat16
        chunk = config.rows * row + closings * costs.closing * CODE_CLOSING
    else:
        row = costs.row + unpacking(problem) + costs.product * 4 * config.blocks_m
        if problem.format.sparsity is not None:
            row *= problem.format.density * _SPARSE_ROW
        chunk = config.rows * row
        chunk += closings * costs.closing * config.blocks_m
    sums = config.tile_m * config.tile_n * 4 * config.warps_k
    meeting = costs.cluster + costs.member * config.cluster if config.cluster > 1 else 0.0
    seconds, busiest = PHYSICS.launch, ""
    registers = _REGISTERS_NEEDED[config.blocks_m, problem.zeros]
    resident = resident_blocks(problem, device, config, registers)
    for load in device.loads(config.grid(problem), config.cluster, resident):
        parts = load.blocks * min(config.warps_k, fed)
        # Warps that share a scheduler. The warps of one part run together, so the scheduler with most of them
        # sets the pace.
        even = config.warps_n / SCHEDULERS
        issued = max(1.0, parts * even + (-(-config.warps_n // SCHEDULERS) - even) / parts)
        ahead = load.blocks * weights * min(1.0, config.stages / fed) / 2**20
        slowed = own * (1 + costs.crowding * ahead)
        times = streaming_seconds(device, load, slowed, read)
        work = chunk * max(costs.stalls, issued) / device.clock
        times["requests"] = (
            turns * config.warps_k / config.stages * (PHYSICS.latency + work + read / fed / costs.copy)
        )
        times["instructions"] = turns * chunk * issued / device.clock
        times["a warp"] = turns * chunk * costs.stalls / device.clock
        times["the TMA producer"] = fed * costs.producer / device.clock
        streamed, busiest = overlapped(times, costs.sharpness)
        last = chunk * costs.stalls / device.clock
        last += PHYSICS.first_bytes + costs.fill
        seconds += load.waves * (streamed + last + load.blocks * sums / PHYSICS.reduction + meeting)
    return seconds, busiest


def _suits(problem: Problem, device: Device, *, dependent: bool) -> bool:
    # GPUs after 9.0 could run it, but it was not measured there. Under dependent launches it lost for every
    # measured layer with as many stages as fit (docs/kernels.md, "Dependent launches"); layers where it wins
    # with fewer are in choose/measured.
    return problem.m <= _MOST_BATCH and device.has_warpgroups and not dependent


BULK = Variant(BulkConfig, lambda device: device.has_clusters, _suits, candidates, estimate)
"""The bulk kernel: small batches, on GPUs with clusters."""
