"""Host side of the warpgroup kernel (``cuda/kernels/warpgroup.cuh``): configurations, resources, seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from marlinq.kernels.contract.arguments import WarpgroupArguments
from marlinq.kernels.contract.configuration import ActivationBox, Variant
from marlinq.kernels.contract.device import Device, Load, registers_of_a_thread
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.operands import Operands
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.whole_rows import (
    PUSHED_COLUMNS,
    SQUARED_COLUMNS,
    MappedRowArguments,
    RowVariant,
)
from marlinq.kernels.variants.arguments import warpgroup_arguments
from marlinq.kernels.variants.costs import PHYSICS, overlapped, resident_blocks, round_trip, streaming_seconds
from marlinq.kernels.variants.stages import chunks_on_their_way, stage_bytes, weight_bytes
from marlinq.kernels.variants.tiles import holds_pairs

# Rows of the smallest batch it is considered for. At 16 rows it lost on all measured layers, so batches below
# 9 were not tried; from 17 on its estimate is always the least, and from 33 on it measured fastest
# (docs/kernels.md, "Which kernel at which batch").
_LEAST_BATCH = 9
# Rows from which batches that are no power of two use one of the few configurations of :func:`common`; with
# one of its own for each batch, a model would need about a hundred. (Servers pad batches to powers of two.)
_COMMON_LEAST = 33
# Rows of the largest tile with an RMS norm or a residual stream; larger ones were not measured.
_WHOLE_ROWS_MOST = 64
# Registers of a consumer thread besides accumulators and operand fragments. The keys are words per lane and
# row (:attr:`WarpgroupConfig.words`). Zero points, the instruction that subtracts and scales at once,
# stream-K (with zero points: per word) and sums sent to other blocks each add some.
_OTHER_REGISTERS = {1: 48, 2: 42, 4: 48}
_ZERO_REGISTERS = {1: 16, 2: 20, 4: 40}
_FUSED_REGISTERS = {1: 4, 2: 4, 4: 20}
_STREAM_K_REGISTERS, _STREAM_K_ZERO_REGISTERS = 22, 12
_PUSH_REGISTERS = {1: 12, 2: 12, 4: 28}
# Rows of the largest tile whose sums are scaled instead of its weights; in larger tiles scaling sums costs
# more than it saves on weights. And for float16, rows of the tiles where one instruction that subtracts and
# scales is faster than either (docs/kernels.md, "Scaled sums and scaled codes").
_SCALED_SUMS_MOST = 64
_FUSED_LEAST, _FUSED_MOST = 32, 96
# Sums are sent to the blocks that own them up to these rows of a tile, and these rows of a cluster's tiles
# together (docs/kernels.md, "Hand-over of sums in a cluster").
_PUSHED_MOST, _PUSHED_ROWS_MOST = 32, 128
# Instructions that scale one operand fragment; and those that unpack, subtract and scale eight codes at once.
_SCALE, _FUSED = 4, 10
# Registers of a consumer and of a producer thread after setmaxnreg, for launches whose even share is too
# small. Keys: number of consumer warpgroups, and whether the producer warpgroup also adds parts of K or
# stores tiles.
_GROWN = {(2, False): (232, 40), (2, True): (224, 56), (3, False): (152, 56), (3, True): (152, 56)}
_TILES_M = (8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176)
# Batches of this many tiles and more take tiles of at most 128 rows: measured as fast as larger ones or
# faster. Larger tiles help only where they save one of few waves (docs/kernels.md, "Large tiles").
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
# Bytes of weights in flight to a multiprocessor whose rings have room for many more.
_ON_THEIR_WAY = 66 * 1024
# Clusters of more blocks than this are considered only where all of them run at once: otherwise never faster.
# Clusters of two can fill the last wave.
_ALWAYS = 2
_MULTIPLICATIONS = 2048  # 16-bit multiply-adds a cycle of a multiprocessor's tensor cores


@dataclass(frozen=True)
class Costs:
    """Fitted constants of the estimate, from times measured on an H200 (``lab/kernels/fit_costs.py``).

    Cycles are those of :attr:`Device.clock`. A row is 16 channels of a warpgroup's columns, a chunk the rows
    that it takes at a time, a product one ``wgmma`` of 64 columns.

    Attributes:
        wave: seconds from a wave's start until its first bytes arrive.
        latency: seconds from a request to its bytes once the ring is full.
        row: cycles a warpgroup needs per row to wait, fetch and issue, dequantisation excluded.
        fragment: cycles a warpgroup needs to dequantise the operand A of one product while no other warpgroup
            runs.
        issue: cycles of a multiprocessor's schedulers per instruction of each warp that dequantises.
        exposed: share of a product's time during which its warpgroup can't dequantise the next operand.
        operand: cycles of a product that don't depend on the rows of the tile.
        chunk: cycles a warpgroup needs to wait for a chunk's stage and to release it.
        sharing: cycles that each further warpgroup of the same chunk adds to ``chunk``.
        drain: cycles to wait for the last products of a chunk before its sums are scaled.
        collision: share of a queue that a newcomer waits for
            (:func:`marlinq.kernels.variants.costs.round_trip`).
        producer: cycles of the TMA producer per chunk.
        order: cycles that requesting a chunk's zero points adds to ``producer``.
        tile: seconds at the end of an unsplit tile, stores excluded.
        staged: seconds at the end of a tile that the producer warpgroup stores during the next tile.
        store: bytes a second at which a multiprocessor rounds and stores an unsplit tile.
        reduction: bytes a second at which a multiprocessor reads sums from its own shared memory.
        remote: bytes a second at which a multiprocessor reads sums from shared memory of its cluster.
        turn: seconds a thread waits for a read from shared memory of its cluster, once per four sums.
        cluster: seconds of two cluster barriers.
        member: seconds that each block of a cluster adds to the barriers.
        handover: seconds of a stream-K launch besides its chunks and the transfer of sums through L2.
        scattered: share of the time of :func:`_displaced` that is added: reads of stream-K tiles that miss L2
            since neighbours work elsewhere in K.
        sharpness: exponent p of the p-norm that combines the shares of a launch's time (p = 1: they add; p
            large: the longest counts).
    """

    wave: float = 3.663e-07
    latency: float = 7.34e-07
    row: float = 22.2
    fragment: float = 1.69
    issue: float = 1.59
    exposed: float = 0.164
    operand: float = 2.71
    chunk: float = 351
    sharing: float = 14.2
    drain: float = 2.42
    collision: float = 1.62
    producer: float = 112
    order: float = 52.9
    tile: float = 1.26e-06
    staged: float = 5.79e-08
    store: float = 7.5e10
    reduction: float = 2.23e10
    remote: float = 3.29e10
    turn: float = 6.88e-08
    cluster: float = 7.1e-07
    member: float = 1.33e-07
    handover: float = 8.5e-07
    scattered: float = 0.0818
    sharpness: float = 4.19


COSTS = Costs()
# Fewest chunks of a block under stream-K.
_LEAST_CHUNKS = 2


@dataclass(frozen=True)
class WarpgroupConfig:
    """The compile-time parameters of the warpgroup kernel (``cuda/kernels/warpgroup.cuh``).

    Attributes:
        tile_m: batch rows of a tile.
        words: 1, 2 or 4: a warp has ``16 * words`` columns, a warpgroup ``64 * words`` and as many products
            (``wgmma``) per row. Named after the 32-bit words of INT4 that a lane loads per row.
        warpgroups_n: consumer warpgroups side by side in N.
        parts_k: consumer warpgroups that split a block's slice of K.
        rows: rows of 16 channels in a chunk.
        cluster: blocks that share a tile, each with a slice of K.
        stages: stages of the ring.
        min_blocks: blocks that must fit on a multiprocessor at once.
        most_blocks: largest grid where blocks take tile after tile.
        stream_k: whether the tiles of the last wave are split evenly over the blocks, in chunks of K.
    """

    tile_m: int
    words: int
    warpgroups_n: int
    parts_k: int
    rows: int
    cluster: int
    stages: int
    min_blocks: int
    most_blocks: int
    stream_k: bool = False

    variant: ClassVar[str] = "warpgroup"
    header: ClassVar[str] = "kernels/warpgroup.cuh"
    function: ClassVar[str] = "w4a16_wgmma"

    @property
    def tile_n(self) -> int:
        """Output columns of a block."""
        return self.warpgroups_n * self.words * 64

    @property
    def multiplying(self) -> int:
        """Consumer warpgroups, which multiply."""
        return self.warpgroups_n * self.parts_k

    @property
    def threads(self) -> int:
        """Threads of a block, with those of the producer warpgroup."""
        return 128 * (self.multiplying + 1)

    @property
    def parts(self) -> int:
        """Parts that K is split into, over blocks and warpgroups."""
        return self.cluster * self.parts_k

    @property
    def pushes(self) -> bool:
        """Whether warps send sums into the shared memory of the blocks that add them, beside the ring."""
        rows = self.tile_m * self.cluster
        return self.cluster > 1 and self.tile_m <= _PUSHED_MOST and rows <= _PUSHED_ROWS_MOST

    @property
    def launch_registers(self) -> int:
        """Registers a thread is launched with."""
        return registers_of_a_thread(self.threads // 32, self.min_blocks)

    def joins_sums(self, problem: Problem) -> bool:
        """Whether the sums of a tile are joined through shared memory; such a block has one tile."""
        return self.parts > 1 or problem.activation is not None

    def has_store_warps(self, problem: Problem) -> bool:
        """Whether warps of the producer warpgroup store tiles.

        They do where a block takes several tiles and is alone on its multiprocessor.
        """
        return (
            not self.joins_sums(problem) and self.min_blocks == 1 and self.tiles(problem) > self.most_blocks
        )

    def scaling(self, problem: Problem) -> str:
        """Name of the values that scales multiply.

        ``SUMS``: sums, at the end of a group or of K. ``WEIGHTS``: weight fragments. ``FUSED``: weight
        fragments, in the instruction that subtracts the zero point.
        """
        if problem.quant_group == 0:
            return "SUMS"
        grown = self._grown(problem)[0]
        sums = (
            problem.quant_group == 16 * self.rows
            and self.tile_m <= _SCALED_SUMS_MOST
            and self._registers(problem, "SUMS") <= max(grown, self.launch_registers)
        )
        if problem.zeros or not problem.format.fuses:
            return "SUMS" if sums else "WEIGHTS"
        if problem.bfloat16 or (self.tile_m <= _FUSED_MOST and (self.tile_m >= _FUSED_LEAST or not sums)):
            return "FUSED"
        return "SUMS" if sums else "WEIGHTS"

    def registers(self, problem: Problem) -> int:
        """Registers that a consumer thread needs."""
        return self._registers(problem, self.scaling(problem))

    def _registers(self, problem: Problem, scaling: str) -> int:
        """Registers that a consumer thread needs with :meth:`scaling` as given."""
        sets = 2 if scaling == "SUMS" and problem.quant_group else 1
        needed = self.words * (sets * self.tile_m // 2 + 8) + _OTHER_REGISTERS[self.words]
        # A thread holds the words of two rows at a time.
        needed += 2 * self.words * (problem.format.block_words - 1)
        if scaling == "FUSED":
            needed += _FUSED_REGISTERS[self.words]
        if self.stream_k:
            needed += _STREAM_K_ZERO_REGISTERS * self.words if problem.zeros else _STREAM_K_REGISTERS
        if self.pushes:
            needed += _PUSH_REGISTERS[self.words]
        return needed + problem.zeros * _ZERO_REGISTERS[self.words]

    def grown_registers(self, problem: Problem) -> tuple[int, int]:
        """Registers of consumer and producer threads after setmaxnreg; (0, 0) if the launch gives enough."""
        return (0, 0) if self.registers(problem) <= self.launch_registers else self._grown(problem)

    def _grown(self, problem: Problem) -> tuple[int, int]:
        """Registers that setmaxnreg could give consumer and producer threads; (0, 0) if it can't be used."""
        if self.min_blocks > 1:
            return 0, 0
        return _GROWN.get(
            (self.multiplying, self.joins_sums(problem) or self.has_store_warps(problem)), (0, 0)
        )

    def fits_registers(self, problem: Problem) -> bool:
        """Whether a consumer thread can get the registers it needs."""
        needed = self.registers(problem)
        return needed <= self.launch_registers or needed <= self._grown(problem)[0]

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of dynamic shared memory of a block: the aligned ring, then room to transpose tiles or to
        receive sums."""
        ring = self.stages * stage_bytes(problem, self.tile_m, self.tile_n, self.rows) + 1024
        if self.joins_sums(problem) and not self.pushes:
            # The sums overwrite the ring, which is no longer needed.
            return max(ring, self.parts_k * self.tile_m * (self.tile_n + 4) * 4)
        return ring + self._bytes_beside_ring(problem)

    def activation_box(self, problem: Problem, stride: int) -> ActivationBox | None:
        """Tensor map with boxes of TILE_M rows."""
        return ActivationBox(problem.m, problem.k, stride, self.tile_m)

    def activates(self, problem: Problem) -> bool:
        """Whether a block holds gate and up of the same columns, whose sums meet in its shared memory."""
        return problem.activation is None or (not self.pushes and holds_pairs(problem, self.tile_n))

    def row_variant(self, problem: Problem, *, normed: bool, adds: bool) -> RowVariant | None:
        """The kernel with norm or residual stream: where :meth:`joins_sums`, in tiles of up to 64 rows."""
        if self.tile_m > _WHOLE_ROWS_MOST or not self.joins_sums(problem):
            return None
        if adds and problem.activation is not None:
            return None
        return RowVariant.of(
            self.instantiation(problem),
            "kernels/warpgroup_rows.cuh",
            PUSHED_COLUMNS if self.pushes else SQUARED_COLUMNS,
            MappedRowArguments,
            normed=normed,
            adds=adds,
        )

    def order_of_sums(self, problem: Problem) -> tuple[object, ...]:
        """Cluster, parts, rows of a chunk, and what scales multiply."""
        return self.variant, self.cluster, self.parts, self.rows, self.scaling(problem)

    def describe(self) -> str:
        """Tile and split of K as text for messages."""
        split = f"K in {self.parts} parts over {self.cluster} blocks"
        return f"tile {self.tile_m}x{self.tile_n}, {'stream-K' if self.stream_k else split}"

    def _bytes_beside_ring(self, problem: Problem) -> int:
        """Bytes of shared memory beside the ring: for sums received, or for tiles to transpose."""
        if self.pushes:
            slots = -(-self.tile_n // 16 // self.cluster)
            return self.parts * slots * self.tile_m * 64
        if self.joins_sums(problem):
            return 0
        # A warp transposes 16 batch rows of its columns at a time, 32 where it has 16 columns.
        rows = 32 if self.words == 1 else 16
        scratch = 4 * rows * (2 * 16 * self.words + 16)
        if self.has_store_warps(problem):
            scratch = max(scratch, self.tile_m * (128 * self.words + 16))
        return self.multiplying * scratch

    def tiles(self, problem: Problem) -> int:
        """Number of tiles of the output."""
        return -(-problem.n // self.tile_n) * -(-problem.m // self.tile_m)

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch."""
        tiles = self.tiles(problem)
        if self.joins_sums(problem):
            return tiles * self.cluster
        if self.stream_k:
            tiles = max(1, tiles * self.chunks(problem) // _LEAST_CHUNKS)
        return min(tiles, self.most_blocks)

    def chunks(self, problem: Problem) -> int:
        """Number of chunks of K."""
        return -(-problem.k // (16 * self.rows))

    def handover(self, problem: Problem) -> Handover | None:
        """Device memory for the sums of stream-K tiles; None without stream-K."""
        if not self.stream_k:
            return None
        blocks = self.grid(problem)
        return Handover(floats=blocks * self.tile_m * self.tile_n, flags=blocks)

    def window(self, problem: Problem) -> int:
        """Chunks of a block in flight at once."""
        chunk = weight_bytes(problem, self.tile_n, self.rows)
        return chunks_on_their_way(chunk, self.stages, self.min_blocks, _ON_THEIR_WAY)

    def instantiation(self, problem: Problem) -> Instantiation:
        """Template and configuration struct to compile for ``problem``."""
        consumer_registers, producer_registers = self.grown_registers(problem)
        return Instantiation(
            self.header,
            self.function,
            (
                *problem.parameters,
                problem.activation_parameter,
                ("TILE_M", self.tile_m),
                ("WORDS", self.words),
                ("WARPGROUPS_N", self.warpgroups_n),
                ("PARTS_K", self.parts_k),
                ("ROWS", self.rows),
                ("SCALING", f"Scaling::{self.scaling(problem)}"),
                ("CLUSTER", self.cluster),
                ("STAGES", self.stages),
                ("WINDOW", self.window(problem)),
                ("MIN_BLOCKS", self.min_blocks),
                ("STREAM_K", self.stream_k),
                ("STORE_WARPS", self.has_store_warps(problem)),
                ("PUSH_SUMS", self.pushes),
                ("CONSUMER_REGISTERS", consumer_registers),
                ("PRODUCER_REGISTERS", producer_registers),
                ("SHARED_BYTES", self.shared_bytes(problem)),
            ),
        )

    def arguments(self, operands: Operands, dependent: bool) -> WarpgroupArguments:
        """The kernel's parameters."""
        return warpgroup_arguments(operands, self.tile_m, self.tile_n // 64, self.rows, dependent)


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
    """The configuration with as many stages as fit in shared memory; None if two a part don't fit."""
    # NVRTC 13.0 puts fragments of this shape into local memory.
    if words == 1 and problem.bfloat16 and problem.quant_group == 32 and not problem.format.fuses:
        return None
    most = device.multiprocessors * min_blocks
    # 1024 bytes a block: barriers, and the shared memory that the driver reserves.
    room = device.shared_bytes // min_blocks - 1024
    shallowest = 2 * parts_k
    config = WarpgroupConfig(
        tile_m, words, warpgroups_n, parts_k, rows, cluster, shallowest, min_blocks, most
    )
    if not config.fits_registers(problem) or config.shared_bytes(problem) > room:
        return None
    ring = room - 1024 - config._bytes_beside_ring(problem)
    stages = min(_MAX_STAGES, ring // stage_bytes(problem, tile_m, config.tile_n, rows))
    # Each part of K has the same number of stages.
    return replace(config, stages=stages // parts_k * parts_k)


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
    problem: Problem, device: Device, config: WarpgroupConfig, costs: Costs = COSTS
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
    # Each product is 64 columns x 16 channels x TILE_M rows, also where the batch has fewer rows.
    columns = products * 64 * 16 * config.tile_m / _MULTIPLICATIONS / device.clock
    shares = {"columns": columns * costs.exposed, "operand": products * costs.operand / device.clock}
    multiplied, _ = overlapped(shares, costs.sharpness)
    scaling = config.scaling(problem)
    scaled_quant_groups = problem.quant_group != 0 and scaling == "SUMS"
    instructions: float = problem.format.unpack[problem.bfloat16]
    if scaled_quant_groups:
        instructions += config.tile_m / 2 / config.rows
    elif scaling == "WEIGHTS":
        instructions += _SCALE
    elif scaling == "FUSED":
        instructions = _FUSED
    dequantised = products * instructions * costs.issue / device.clock
    waited = (costs.row + products * costs.fragment) / device.clock
    handed = costs.chunk + costs.drain * scaled_quant_groups + costs.sharing * (config.warpgroups_n - 1)
    handed /= device.clock
    ends = batch * config.tile_n * (4 * config.parts_k if split else 2)
    meeting = costs.cluster + costs.member * config.cluster if config.cluster > 1 else 0.0
    if config.cluster > 1 and not config.pushes:
        meeting += costs.turn * math.ceil(batch * config.tile_n / 4 / (config.cluster * config.threads))
    rate = costs.store if not split else costs.remote if config.cluster > 1 else costs.reduction
    seconds, busiest = PHYSICS.launch + costs.wave * (not split), ""
    loads = device.loads(config.tiles(problem) * config.cluster, config.cluster, resident)
    if config.stream_k:
        loads = [Load(1, config.min_blocks, config.grid(problem))]
    for load in loads:
        count = load.blocks * config.warpgroups_n * min(config.parts_k, fed)
        row = round_trip(count, waited, (dequantised, multiplied), costs.collision)
        work = config.rows * row + handed
        times = streaming_seconds(device, load, own, read)
        times["requests"] = (
            turns * config.parts_k / config.stages * (costs.latency + work + read / fed / PHYSICS.port)
        )
        times["products"] = turns * work
        times["tensor cores"] = load.blocks * fed * config.warpgroups_n * config.rows * columns
        times["the TMA producer"] = fed * (costs.producer + costs.order * problem.zeros) / device.clock
        streamed, busiest = overlapped(times, costs.sharpness)
        begun = config.rows * (waited + dequantised + multiplied)
        last = begun + load.blocks * ends / rate
        last += costs.wave + meeting if split else costs.tile
        earlier = begun + costs.staged if config.has_store_warps(problem) else last
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
