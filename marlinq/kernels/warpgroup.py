"""The host's side of the warpgroup kernel (``cuda/w4a16_wgmma.cu``): variants, resources and cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from marlinq.kernels.handover import Handover
from marlinq.kernels.operands import Operands, WarpgroupArguments
from marlinq.kernels.problem import Device, Problem, registers_of_a_thread
from marlinq.kernels.stages import FEED_CYCLES, stage_bytes

# Registers of a multiplying thread beside its accumulators and operand fragments: narrow or wide, with zero
# points, and where tiles are dealt out in chunks, without and with zero points.
_OTHER_REGISTERS = {False: 40, True: 48}
_ZERO_REGISTERS = 16
_EVEN_REGISTERS = {False: 4, True: 12}
# By the number of multiplying warpgroups and whether K is split: registers of a multiplying and of a copying
# thread when the even share of a launch is not enough (setmaxnreg). The latter keeps what a reduction needs.
_GROWN = {(2, False): (232, 40), (2, True): (224, 56), (3, False): (152, 56), (3, True): (152, 56)}
_TILES_M = (8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176)
_SHAPES = (
    # wide, groups_n, parts_k
    (True, 1, 1),
    (True, 1, 2),
    (True, 1, 3),
    (True, 2, 1),
    (False, 1, 1),
    (False, 1, 2),
    (False, 2, 1),
    (False, 3, 1),
)
_MAX_STAGES = 12
# Cycles of a multiprocessor to dequantise a 512-byte row of weights: 64 instructions, a third at half rate.
_ROW_CYCLES = 22
# Cycles of a warpgroup for a row of the last chunk, with nothing left to overlap with; not measured.
_LAST_ROW_CYCLES = 130
# Chunks that a block has at least where they are dealt out evenly.
_LEAST_CHUNKS = 2
# Whole tiles that keep the multiprocessors busier than this are not dealt out in chunks.
_WELL_FILLED = 0.95
# How much of the work that is not the bottleneck still shows.
_UNHIDDEN = 0.1


@dataclass(frozen=True)
class WarpgroupConfig:
    """The compile-time parameters of the warpgroup kernel; see its header comment."""

    tile_m: int
    wide: bool
    groups_n: int
    parts_k: int
    rows: int
    cluster: int
    stages: int
    min_blocks: int
    most_blocks: int  # of a launch whose blocks take tile after tile
    even: bool = False  # the last tiles are dealt out in chunks of K

    source: ClassVar[str] = "w4a16_wgmma.cu"
    function: ClassVar[str] = "w4a16_wgmma"

    @property
    def tile_n(self) -> int:
        """Output columns of a block."""
        return self.groups_n * (256 if self.wide else 128)

    @property
    def multiplying(self) -> int:
        """Warpgroups that multiply."""
        return self.groups_n * self.parts_k

    @property
    def threads(self) -> int:
        """Threads of a block, the copying warpgroup included."""
        return 128 * (self.multiplying + 1)

    @property
    def parts(self) -> int:
        """Parts that K is split into, over blocks and warpgroups."""
        return self.cluster * self.parts_k

    @property
    def launch_registers(self) -> int:
        """Registers a thread is launched with."""
        return registers_of_a_thread(self.threads // 32, self.min_blocks)

    def registers(self, problem: Problem) -> int:
        """Registers that a multiplying thread needs."""
        products = 4 if self.wide else 2
        needed = products * self.tile_m // 2 + products * 8 + _OTHER_REGISTERS[self.wide]
        if self.even:
            needed += _EVEN_REGISTERS[problem.zeros]
        return needed + problem.zeros * _ZERO_REGISTERS

    def grown_registers(self, problem: Problem) -> tuple[int, int]:
        """What multiplying and copying threads change to at their start; zeros if the launch gives enough."""
        if self.registers(problem) <= self.launch_registers or self.min_blocks > 1:
            return 0, 0
        return _GROWN.get((self.multiplying, self.parts > 1), (0, 0))

    def fits_registers(self, problem: Problem) -> bool:
        """Whether the accumulators fit what a thread can get."""
        return self.registers(problem) <= (self.grown_registers(problem)[0] or self.launch_registers)

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block: the aligned ring, then what transposes or reduces."""
        ring = self.stages * stage_bytes(problem, self.tile_m, self.tile_n, self.rows) + 1024
        if self.parts > 1:
            return max(ring, self.parts_k * self.tile_m * (self.tile_n + 4) * 4)
        columns = 64 if self.wide else 32  # of a warp, which transposes twice eight rows of them
        return ring + self.multiplying * 4 * 16 * (2 * columns + 16)

    def tiles(self, problem: Problem) -> int:
        """Tiles of the output."""
        return -(-problem.n // self.tile_n) * -(-problem.m // self.tile_m)

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch."""
        tiles = self.tiles(problem)
        if self.parts > 1:
            return tiles * self.cluster
        if self.even:
            tiles = max(1, tiles * self.chunks(problem) // _LEAST_CHUNKS)
        return min(tiles, self.most_blocks)

    def chunks(self, problem: Problem) -> int:
        """Chunks of K."""
        return -(-problem.k // (16 * self.rows))

    def handover(self, problem: Problem) -> Handover | None:
        """What blocks that share a tile leave sums in; None where they don't."""
        if not self.even:
            return None
        warps = self.grid(problem) * self.multiplying * 4
        return Handover(floats=warps * self.tile_m * self.tile_n // (self.groups_n * 4), flags=warps)

    def defines(self, problem: Problem) -> dict[str, object]:
        """The preprocessor definitions of the variant."""
        return {
            "ELEMENT": "Bfloat16" if problem.bfloat16 else "Half",
            "TILE_M": self.tile_m,
            "WIDE": int(self.wide),
            "GROUPS_N": self.groups_n,
            "PARTS_K": self.parts_k,
            "ROWS": self.rows,
            "GROUP": problem.group,
            "ZEROS": int(problem.zeros),
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "MIN_BLOCKS": self.min_blocks,
            "EVEN": int(self.even),
            "GROWN": self.grown_registers(problem)[0],
            "SHRUNK": self.grown_registers(problem)[1],
        }

    def arguments(self, operands: Operands, dependent: bool) -> WarpgroupArguments:
        """The kernel's parameters."""
        return operands.warpgroup_arguments(self.tile_m, self.tile_n // 64, self.rows, dependent)


def candidates(problem: Problem, device: Device, batch_invariant: bool = False) -> Iterator[WarpgroupConfig]:
    """The variants worth estimating, all of which fit the device's registers and shared memory.

    With ``batch_invariant`` only those whose order of summation is the same for every M.
    """
    if not device.has_warpgroups:
        return
    # A tile that holds the batch, or one of those that split it into the fewest tiles of their number.
    smallest = next((tile for tile in _TILES_M if tile >= problem.m), _TILES_M[-1])
    for tile_m in (tile for tile in _TILES_M if min(smallest, 64) <= tile <= smallest):
        for (wide, groups_n, parts_k), rows, min_blocks in itertools.product(_SHAPES, (8, 4), (1, 2)):
            for cluster in device.cluster_sizes:
                if cluster * parts_k > -(-problem.k // (16 * rows)):
                    continue
                config = _deepest(problem, device, tile_m, wide, groups_n, parts_k, rows, cluster, min_blocks)
                if config is None:
                    continue
                yield config
                dealt_out = replace(config, even=True)
                if not batch_invariant and _worth_dealing_out(problem, dealt_out):
                    yield dealt_out


def _worth_dealing_out(problem: Problem, config: WarpgroupConfig) -> bool:
    """Whether an even split of the last tiles is possible, and whole ones leave multiprocessors idle."""
    if config.parts > 1 or config.grid(problem) == 1 or not config.fits_registers(problem):
        return False
    tiles = config.tiles(problem)
    return tiles / (-(-tiles // config.most_blocks) * config.most_blocks) < _WELL_FILLED


def _deepest(
    problem: Problem,
    device: Device,
    tile_m: int,
    wide: bool,
    groups_n: int,
    parts_k: int,
    rows: int,
    cluster: int,
    min_blocks: int,
) -> WarpgroupConfig | None:
    """The variant with as many stages as shared memory has room for, if it fits with two a part at least."""
    most = device.multiprocessors * min_blocks
    # The barriers, and what the driver keeps of every block, come on top.
    room = device.shared_bytes // min_blocks - 1024
    # A stage belongs to one part, which begins its next chunk before it gives the last one back.
    for stages in range(_MAX_STAGES, 2 * parts_k - 1, -parts_k):
        config = WarpgroupConfig(tile_m, wide, groups_n, parts_k, rows, cluster, stages, min_blocks, most)
        if config.shared_bytes(problem) <= room:
            return config if config.fits_registers(problem) else None
    return None


def estimate(problem: Problem, device: Device, config: WarpgroupConfig) -> tuple[float, str]:
    """Seconds of a launch, and what the busiest multiprocessor spends them on."""
    chunk = 16 * config.rows
    chunks = config.chunks(problem)
    sms = device.multiprocessors
    loads = device.loads(config.tiles(problem) * config.cluster, config.cluster, config.min_blocks)
    # Blocks that share a multiprocessor share its throughput.
    waves, tiles = sum(count for count, _ in loads), float(sum(count * blocks for count, blocks in loads))
    if config.even:
        blocks = -(-config.grid(problem) // sms)
        tiles = blocks * -(-config.tiles(problem) * chunks // config.grid(problem)) / chunks
    channels = -(-chunks // config.parts) * config.parts_k * chunk
    weights = channels * config.tile_n * (0.5 + problem.scale_bytes_per_weight)
    activations = channels * min(config.tile_m, problem.m) * 2
    # Neighbouring tiles share their weights, which come from device memory once.
    sharing = min(-(-problem.m // config.tile_m), max(1, 1024 // config.tile_m))
    times = {
        "weights": weights / sharing / (device.bandwidth / sms),
        "activations": (weights + activations) / (device.cache_bandwidth / sms),
        # Fewer than 32 columns take a product no less time.
        "tensor cores": 2.0 * channels * config.tile_n * max(config.tile_m, 32) / (device.tensor_rate / sms),
        "instructions": channels // 16 * (config.tile_n // 64) * _ROW_CYCLES / device.clock,
        "the feed": -(-chunks // config.cluster) * FEED_CYCLES / device.clock,
    }
    busiest = max(times, key=lambda name: times[name])
    tile = times[busiest] + _UNHIDDEN * (sum(times.values()) - times[busiest])
    # Launch, the first bytes' way and the drain; every further tile costs its narrowing and storing.
    seconds = 1.8e-6 + tiles * tile + config.rows * _LAST_ROW_CYCLES / device.clock
    if config.parts > 1:
        reduced = min(config.tile_m, problem.m) * config.tile_n * 4 * config.parts_k
        seconds += waves * reduced / 2.0e11 + 0.1e-6 * (config.cluster - 1) + 1.0e-6 * (waves - 1)
    elif config.even:
        # A tile's first and last part, and the sums that go from block to block through L2: those that meet
        # in a tile are read one after the other.
        sums = config.tile_m * config.tile_n * 4 / (device.cache_bandwidth / sms)
        givers = max(1, config.grid(problem) // config.tiles(problem))
        seconds += 0.5e-6 * math.ceil(tiles + blocks) + 1.5e-6 + blocks * (1 + givers) * sums
    else:
        seconds += 0.5e-6 * tiles
    return seconds, busiest
