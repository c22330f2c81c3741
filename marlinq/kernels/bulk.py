"""The host's side of the bulk kernel (``cuda/w4a16_bulk.cu``): variants, resources and cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from marlinq.kernels.operands import MappedArguments, Operands
from marlinq.kernels.problem import Device, Problem, registers_of_a_thread
from marlinq.kernels.stages import FEED_CYCLES, stage_bytes
from marlinq.kernels.tiles import WarpTiles

# Registers a thread needs to stay clear of spills, by BLOCKS_M and zero points
# (tests/kernels/test_compile.py).
_REGISTERS_NEEDED = {(1, False): 96, (1, True): 112, (2, False): 128, (2, True): 168}
_REGISTERS_OF_SHORT_GROUPS = 32  # more, when a chunk holds several groups
# Cycles of a multiprocessor for a 512-byte row of weights; not measured: from the stream kernel's and the
# difference in instructions.
_ROW_CYCLES = {1: 22, 2: 30}
# Cycles of a warp for a row of the last chunk, with nothing left to overlap with.
_LAST_ROW_CYCLES = {1: 120, 2: 170}
_MAX_STAGES = 32
_MAX_BLOCKS = 3  # a multiprocessor
_WARPS = range(4, 17)


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

    source: ClassVar[str] = "w4a16_bulk.cu"
    function: ClassVar[str] = "w4a16_bulk"

    @property
    def threads(self) -> int:
        """Threads of a block, the copying warp included."""
        return 32 * (self.warps_n * self.warps_k + 1)

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block: the aligned ring of stages, and where sums are received."""
        slots = -(-4 * self.warps_n // self.cluster)
        received = self.parts * slots * self.blocks_m * 512
        return self.stages * stage_bytes(problem, self.tile_m, self.tile_n, self.rows) + received + 1024

    def defines(self, problem: Problem) -> dict[str, object]:
        """The preprocessor definitions of the variant."""
        return {
            "ELEMENT": "Bfloat16" if problem.bfloat16 else "Half",
            "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k,
            "BLOCKS_M": self.blocks_m,
            "ROWS": self.rows,
            "GROUP": problem.group,
            "ZEROS": int(problem.zeros),
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "MIN_BLOCKS": self.min_blocks,
        }

    def arguments(self, operands: Operands, dependent: bool) -> MappedArguments:
        """The kernel's parameters."""
        return operands.mapped_arguments(self.tile_m, self.warps_n, self.rows, dependent)


def candidates(problem: Problem, device: Device) -> Iterator[BulkConfig]:
    """The variants worth estimating, all of which fit the device's registers and shared memory."""
    if not device.has_clusters:
        return
    blocks_m = 1 if problem.m <= 8 else 2
    shapes = [
        (warps_n, warps_k)
        for warps_n, warps_k in itertools.product(range(1, 9), (1, 2, 3, 4, 6, 8, 12, 16))
        if warps_n * warps_k in _WARPS
    ]
    for rows, (warps_n, warps_k), cluster in itertools.product((8, 4), shapes, device.cluster_sizes):
        if cluster * warps_k > max(-(-problem.k // (16 * rows)), 4):
            continue
        short_groups = 0 < problem.group < 16 * rows
        registers = _REGISTERS_NEEDED[blocks_m, problem.zeros] + short_groups * _REGISTERS_OF_SHORT_GROUPS
        for blocks in range(1, _MAX_BLOCKS + 1):
            if registers_of_a_thread(warps_n * warps_k + 1, blocks) < registers:
                continue
            # The barriers, and what the driver keeps of every block, come on top.
            room = device.shared_bytes // blocks - 2048
            single = BulkConfig(warps_n, warps_k, blocks_m, rows, cluster, 0, blocks)
            stage = stage_bytes(problem, single.tile_m, single.tile_n, rows)
            # A stage belongs to one part.
            stages = min(_MAX_STAGES, (room - single.shared_bytes(problem)) // stage) // warps_k * warps_k
            if stages >= 2 * warps_k:
                yield BulkConfig(warps_n, warps_k, blocks_m, rows, cluster, stages, blocks)


def estimate(problem: Problem, device: Device, config: BulkConfig) -> tuple[float, str]:
    """Seconds of a launch, and what the busiest multiprocessor spends them on."""
    chunks = -(-problem.k // config.chunk)
    sms = device.multiprocessors
    loads = device.loads(config.grid(problem), config.cluster, config.min_blocks)
    slice_chunks = -(-chunks // config.cluster)
    channels = slice_chunks * config.chunk
    weights = channels * config.tile_n * (0.5 + problem.scale_bytes_per_weight)
    activations = channels * min(config.tile_m, problem.m) * 2
    # The part with the most chunks decides.
    turns = -(-slice_chunks // config.warps_k) * config.warps_k
    cycles = turns * config.rows * config.warps_n * _ROW_CYCLES[config.blocks_m]
    last = config.rows * _LAST_ROW_CYCLES[config.blocks_m] / device.clock
    seconds, busiest = 2.2e-6 + last + 0.8e-6 * (sum(waves for waves, _ in loads) - 1), ""
    for waves, blocks in loads:
        in_flight = blocks * (config.stages - 1) * config.warps_n * config.rows * 512
        times = {
            "weights": blocks * weights / min(device.bandwidth / sms, in_flight / 1.2e-6),
            "activations": blocks * (weights + activations) / (device.cache_bandwidth / sms),
            "instructions": blocks * cycles / device.clock,
            "the feed": slice_chunks * FEED_CYCLES / device.clock,
        }
        busiest = max(times, key=lambda name: times[name])
        seconds += waves * times[busiest]
    return seconds + 0.1e-6 * (config.cluster - 1), busiest
