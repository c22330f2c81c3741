"""Host side of the stream kernel (``cuda/kernels/stream.cuh``): configurations, resources, estimated
seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from marlinq.kernels.contract.arguments import PlainArguments
from marlinq.kernels.contract.configuration import ActivationBox, Variant
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.whole_rows import SQUARED_COLUMNS, PlainRowArguments, RowVariant
from marlinq.kernels.variants.costs import (
    PHYSICS,
    REGISTERS,
    SCHEDULERS,
    overlapped,
    resident_blocks,
    streaming_seconds,
)
from marlinq.kernels.variants.pack_arguments import plain_arguments
from marlinq.kernels.variants.tiles import (
    CODE_CLOSING,
    CODE_PRODUCTS,
    CODE_SHIFTS_BFLOAT16,
    DIGIT_CLOSING,
    WarpTiles,
    cluster_sizes,
    holds_pairs,
    unpacking,
)

# Bytes of shared memory that a block must be able to have for chunks of eight rows of 8-bit codes; else four.
_LONG_CHUNKS_BYTES = 160_000
# Rows of the largest batch it is considered for on GPUs that can also run the warpgroup kernel.
_MOST_BATCH = 16
# Rows of the largest tile with an RMS norm or a residual stream.
_ROWS_MOST = 8
# Registers a thread needs to avoid spills (tests/kernels/test_compile.py), by (BLOCKS_M, SCALE_SUMS).
_REGISTERS_NEEDED = {
    (1, True): 128,
    (1, False): 128,
    (2, True): 208,
    (2, False): 128,
    (4, True): 255,
    (4, False): 128,
    (8, False): 240,
}
# (warps side by side, parts of K): the pairs (blocks a multiprocessor, stages) considered with them. Of
# 20,000 random layers, batches and formats on eleven GPUs, hardly one chose anything else.
_SHAPES = {
    (1, 4): ((1, 3), (1, 4), (1, 6), (2, 3), (2, 4), (3, 3)),
    (1, 6): ((1, 3), (2, 3)),
    (1, 8): ((1, 3), (1, 4), (1, 6)),
    (2, 2): ((1, 3), (1, 4), (1, 6), (2, 3), (3, 3)),
    (2, 4): ((1, 3),),
    (3, 2): ((1, 3),),
    (3, 4): ((1, 3),),
    (4, 1): ((1, 3), (1, 4), (2, 3)),
    (4, 2): ((1, 3), (2, 3)),
    (5, 1): ((1, 3), (2, 3), (3, 3)),
    (5, 2): ((1, 3),),
    (6, 1): ((1, 3), (2, 3)),
    (6, 2): ((1, 3),),
    (7, 1): ((1, 3), (2, 3)),
    (7, 2): ((1, 3),),
    (8, 1): ((1, 3),),
}
# Integer digits (``cuda/mma/integer_digits.cuh``): bytes of shared memory a warp, and registers of a thread
# by whether a chunk lies within one group.
_DIGIT_BYTES = 512
_REGISTERS_DIGITS = {True: 96, False: 128}
# Issue cycles per stored row of sparse weights (32 channels) over those per dense row (16 channels).
# Fitted to 20 products on an H200.
_SPARSE_ROW = 1.45
# Registers the compiler gives a thread without a limit, by BLOCKS_M (lab/kernels/resources.py).
_REGISTERS_USED = {1: 128, 2: 144, 4: 152, 8: 208}


@dataclass(frozen=True)
class StreamCosts:
    """Fitted constants of the estimate, from times measured on an H200 (``lab/kernels/fit_costs.py``).

    Cycles are those of :attr:`Device.clock`. Instructions are counted in issue cycles of one scheduler. A row
    is 16 channels x 64 columns of weights, a chunk the rows that a warp takes at a time; a step is one chunk
    of every warp of a block.

    Attributes:
        crowding: increase of memory time, as a factor, per mebibyte that each multiprocessor requests ahead.
        row: issue cycles a warp needs per row where zero points are subtracted, products and scaling
            excluded.
        codes: issue cycles a warp needs per row where codes are multiplied without subtraction, products and
            scaling excluded.
        digits: issue cycles a warp needs per row where integer digits are multiplied, scaling excluded.
        conversion: cycles a warp waits while a chunk's activations are converted to digits.
        product: issue cycles of an ``mma.sync``.
        closing: issue cycles to scale sums, per row, block of eight batch rows and quantisation group of a
            chunk.
        scaling: issue cycles to scale weights instead of sums, per row.
        stalls: cycles a row takes, as a multiple of its issue cycles, for the only warp of a scheduler.
        step: cycles of the barrier that ends a step.
        sharpness: exponent p of the p-norm that combines the shares of a launch's time (p = 1: they add; p
            large: the longest counts).
    """

    crowding: float = 1.34
    row: float = 35.5
    codes: float = 21.9
    digits: float = 70.1
    conversion: float = 310
    product: float = 10.2
    closing: float = 3.67
    scaling: float = 22.3
    stalls: float = 0.616
    step: float = 365
    sharpness: float = 39


COSTS = StreamCosts()


@dataclass(frozen=True)
class StreamConfig(WarpTiles):
    """The compile-time parameters of the stream kernel; see its header comment.

    With ``digits`` a block has one batch row and multiplies by integer ``mma.sync``
    (``cuda/mma/integer_digits.cuh``).
    """

    warps_n: int
    warps_k: int
    blocks_m: int
    rows: int
    scale_sums: bool
    cluster: int
    stages: int
    min_blocks: int
    digits: bool = False

    variant: ClassVar[str] = "stream"
    header: ClassVar[str] = "kernels/stream.cuh"
    function: ClassVar[str] = "w4a16_stream"

    @property
    def tile_m(self) -> int:
        """Batch rows of a block."""
        return 1 if self.digits else 8 * self.blocks_m

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_n * self.warps_k

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of dynamic shared memory of a block: the ring of stages, or the sums that replace it at the
        end if they need more."""
        warps = self.warps_n * self.warps_k
        groups = 1 if problem.quant_group == 0 else max(1, self.chunk // problem.quant_group)
        stage = warps * 64 * problem.format.chunk_bytes(self.rows)
        stage += self.warps_k * self.tile_m * self.chunk * 2
        stage += warps * groups * (2 if problem.zeros else 1) * 128
        reduction = self.warps_k * self.tile_m * (self.tile_n + 4) * 4
        ring = self.stages * stage + (warps * _DIGIT_BYTES if self.digits else 0)
        return max(ring, reduction)

    def instantiation(self, problem: Problem) -> Instantiation:
        """Template and configuration struct to compile for ``problem``."""
        return Instantiation(
            self.header,
            self.function,
            (
                *problem.parameters,
                problem.activation_parameter,
                ("WARPS_N", self.warps_n),
                ("WARPS_K", self.warps_k),
                ("BLOCKS_M", self.blocks_m),
                ("ROWS", self.rows),
                ("SCALE_SUMS", self.scale_sums),
                ("DIGITS", self.digits),
                ("CLUSTER", self.cluster),
                ("STAGES", self.stages),
                ("MIN_BLOCKS", self.min_blocks),
                ("SHARED_BYTES", self.shared_bytes(problem)),
            ),
        )

    def arguments(self, operands: ProductTensors, dependent: bool) -> PlainArguments:
        """The kernel's parameters."""
        return plain_arguments(operands, dependent)

    def activation_box(self, problem: Problem, stride: int) -> ActivationBox | None:
        """None: activations are read by address, without a tensor map."""
        return None

    def handover(self, problem: Problem) -> Handover | None:
        """None: the blocks of a tile are a cluster."""
        return None

    def activates(self, problem: Problem) -> bool:
        """Whether a block holds gate and up of the same columns, whose sums meet in its shared memory."""
        return problem.activation is None or holds_pairs(problem, self.tile_n)

    def row_variant(self, problem: Problem, *, normed: bool, adds: bool) -> RowVariant | None:
        """The kernel with norm or residual stream, in tiles of eight rows; larger tiles lack registers."""
        if self.tile_m > _ROWS_MOST or (adds and problem.activation is not None):
            return None
        return RowVariant.of(
            self.instantiation(problem),
            "kernels/stream_rows.cuh",
            SQUARED_COLUMNS,
            PlainRowArguments,
            normed=normed,
            adds=adds,
        )

    def order_of_sums(self, problem: Problem) -> tuple[object, ...]:
        """Parts, rows of a chunk, and whether sums are scaled."""
        return self.variant, self.parts, self.rows, self.scale_sums

    def describe(self) -> str:
        """Tile and split of K as text for messages."""
        split = f"K in {self.parts} parts over {self.cluster} blocks"
        digits = " by integer digits" if self.digits else ""
        return f"tile {self.tile_m}x{self.tile_n}{digits}, {split}"


def candidates(problem: Problem, device: Device, batch_invariant: bool = False) -> Iterator[StreamConfig]:
    """The configurations worth estimating, all of which fit the device's registers and shared memory.

    With ``batch_invariant`` all of them scale weights and take chunks of the same length, for every M.
    """
    if batch_invariant:
        blocks_m = 2 if problem.m <= 16 else 4
        registers = 240 if blocks_m == 4 and problem.zeros else _REGISTERS_NEEDED[blocks_m, False]
        yield from _splits(problem, device, blocks_m, scale_sums=False, registers=registers, every=True)
        return
    # Tiles of 64 rows spill on some architectures with zero points and one group, or groups of 32. On 10.x
    # under NVRTC 13.0 they spill with such groups even without zero points, and with every format whose
    # subtraction and scaling take two instructions.
    single_or_smallest = problem.quant_group in (0, 32)
    spills = problem.zeros and single_or_smallest
    if device.capability // 10 == 10:
        spills = single_or_smallest or not problem.format.fuses
    largest = 4 if spills else 8
    blocks_m = next((b for b in (1, 2, 4) if 8 * b >= problem.m), largest)
    # Integer digits would run on other GPUs, too, but were measured on 9.0 only.
    if problem.m == 1 and device.has_warpgroups and problem.format.sums_codes:
        registers = _REGISTERS_DIGITS[problem.quant_group in (0, 128)]
        yield from _splits(problem, device, 1, scale_sums=True, registers=registers, digits=True)
        return
    for wanted in _ways_of_scaling(problem, device, blocks_m):
        # A short chunk is 64 channels, half a group of 128: sums can't be scaled at its end.
        scale_sums = wanted and not (problem.quant_group == 128 and _takes_short_chunks(problem, device))
        registers = _REGISTERS_NEEDED[blocks_m, scale_sums]
        if blocks_m == 1 and problem.quant_group in (32, 64):
            registers = 160  # with several groups a chunk
        if (blocks_m, scale_sums) == (4, False) and problem.zeros:
            registers = 240
        yield from _splits(problem, device, blocks_m, scale_sums, registers)


def _ways_of_scaling(problem: Problem, device: Device, blocks_m: int) -> tuple[bool, ...]:
    """Values of SCALE_SUMS to consider: True scales sums at every group's end, False scales weights.

    Scaling sums needs a second set of accumulators.
    """
    if problem.quant_group == 16:
        return (False,)
    if blocks_m == 1:
        return (True,)
    if blocks_m == 2 and device.has_warpgroups and problem.quant_group in (0, 128):
        return (True,)  # where scaling weights is faster, the bulk or warpgroup kernel is faster still
    # NVRTC 13.0 spills registers of sparse tiles of 32 rows, too.
    spills = problem.format.sparsity is not None
    spills |= device.capability // 10 == 10 and not problem.format.fuses
    if blocks_m == 2 or (blocks_m == 4 and problem.quant_group in (0, 128) and not spills):
        return (False, True)
    return (False,)


def _takes_short_chunks(problem: Problem, device: Device) -> bool:
    """Whether chunks have four rows of 16 channels, because three stages of eight rows don't fit."""
    return problem.format.bits == 8 and device.shared_bytes < _LONG_CHUNKS_BYTES


def _splits(
    problem: Problem,
    device: Device,
    blocks_m: int,
    scale_sums: bool,
    registers: int,
    every: bool = False,
    digits: bool = False,
) -> Iterator[StreamConfig]:
    """Configurations for all splits of K over warps and clusters.

    With ``every`` clusters that don't all run at once are included; otherwise they never win.
    """
    rows = 4 if blocks_m == 8 or _takes_short_chunks(problem, device) else 8
    for (warps_n, warps_k), listed in _SHAPES.items():
        most = min(3, REGISTERS // (registers * 32 * warps_n * warps_k))
        for blocks, stages in listed:
            if blocks > most:
                continue
            config = StreamConfig(warps_n, warps_k, blocks_m, rows, scale_sums, 1, stages, blocks, digits)
            if config.shared_bytes(problem) * blocks > device.shared_bytes:
                continue
            resident = _resident(problem, device, config)
            for cluster in cluster_sizes(problem, device, config, resident, every=every):
                yield replace(config, cluster=cluster)


def _resident(problem: Problem, device: Device, config: StreamConfig) -> int:
    """Blocks that fit on a multiprocessor, by registers and shared memory."""
    used = (
        _REGISTERS_DIGITS[problem.quant_group in (0, 128)]
        if config.digits
        else _REGISTERS_USED[config.blocks_m]
    )
    return resident_blocks(problem, device, config, used)


def estimate(
    problem: Problem, device: Device, config: StreamConfig, costs: StreamCosts = COSTS
) -> tuple[float, str]:
    """Seconds of a launch, and what the busiest multiprocessor spends most of them on."""
    chunks = -(-problem.k // config.chunk)
    steps = -(-chunks // config.parts)
    batch = min(config.tile_m, problem.m)
    channels = chunks / config.cluster * config.chunk
    weights = channels * config.tile_n * problem.bytes_per_weight
    read = weights + channels * batch * 2
    own = weights / -(-problem.m // config.tile_m)
    # Quantisation groups that end in a chunk.
    closings = config.chunk / min(problem.quant_group or config.chunk, config.chunk)
    if config.digits:
        row = costs.digits + costs.closing * closings * DIGIT_CLOSING
    elif config.scale_sums and config.blocks_m == 1 and problem.format.sums_codes:
        row = costs.codes + costs.product * CODE_PRODUCTS + costs.closing * closings * CODE_CLOSING
        row += CODE_SHIFTS_BFLOAT16 * problem.bfloat16
    else:
        row = costs.row + unpacking(problem) + costs.product * 4 * config.blocks_m
        if problem.format.sparsity is not None:
            row *= problem.format.density * _SPARSE_ROW
        row += costs.closing * closings * config.blocks_m if config.scale_sums else costs.scaling
    warps = config.warps_n * config.warps_k
    sums = batch * config.tile_n * 4 * config.warps_k
    meeting = PHYSICS.meeting(config.cluster)
    # A block alone reads its sums from its own shared memory, about as fast as its port.
    meeting_rate = PHYSICS.remote if config.cluster > 1 else PHYSICS.port
    seconds, busiest = PHYSICS.launch, ""
    resident = _resident(problem, device, config)
    for load in device.loads(config.grid(problem), config.cluster, resident):
        issued = -(-load.blocks * warps // SCHEDULERS)  # warps of the fullest scheduler
        # Share of a warp's chunks that are requested together at the start.
        first = min(1.0, (config.stages - 1) / steps)
        ahead = load.blocks * first * weights / 2**20
        slowed = own * (1 + costs.crowding * ahead * (1 - first))
        times = streaming_seconds(device, load, slowed, read)
        times["requests"] = steps / (config.stages - 1) * PHYSICS.latency
        # While the warps of a block wait at the barrier that ends a step, only other blocks issue.
        met = costs.step / load.blocks
        times["instructions"] = steps * (config.rows * row * issued + met) / device.clock
        alone = config.rows * row * costs.stalls + (costs.conversion if config.digits else 0.0)
        times["a warp"] = steps * (alone + costs.step) / device.clock
        streamed, busiest = overlapped(times, costs.sharpness)
        last = config.rows * row * max(issued, costs.stalls) / device.clock
        seconds += load.waves * (
            PHYSICS.first_bytes + streamed + last + load.blocks * sums / meeting_rate + meeting
        )
    return seconds, busiest


def _suits(problem: Problem, device: Device, *, dependent: bool) -> bool:
    return problem.m <= _MOST_BATCH or not device.has_warpgroups


STREAM = Variant(StreamConfig, lambda device: True, _suits, candidates, estimate, any_batch=True)
"""The stream kernel: on every GPU, for every batch."""
