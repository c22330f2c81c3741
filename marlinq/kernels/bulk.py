"""The host's side of the bulk kernel (``cuda/w4a16_bulk.cu``): variants, resources and cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from marlinq.kernels.operands import MappedArguments, Operands
from marlinq.kernels.problem import Device, Problem, registers_of_a_thread

_CHUNK = 128
_ROWS = 8
# Registers a thread needs to stay clear of spills, by BLOCKS_M and zero points
# (tests/kernels/test_compile.py).
_REGISTERS_NEEDED = {(1, False): 96, (1, True): 112, (2, False): 128, (2, True): 168}
_REGISTERS_OF_SHORT_GROUPS = 32  # more, when a chunk holds several groups
# Cycles of a multiprocessor for a 512-byte row of weights; not measured, those of the stream kernel less
# the share of instructions that its copies take.
_ROW_CYCLES = {1: 31, 2: 40}
_MAX_CLUSTER = 8
_MAX_BLOCKS = 3  # a multiprocessor
_WARPS = range(4, 17)


@dataclass(frozen=True)
class BulkConfig:
    """The compile-time parameters of the bulk kernel; see its header comment."""

    warps_n: int
    warps_k: int
    blocks_m: int
    cluster: int
    stages: int
    min_blocks: int

    source: ClassVar[str] = "w4a16_bulk.cu"
    function: ClassVar[str] = "w4a16_bulk"

    @property
    def tile_m(self) -> int:
        """Batch rows of a block."""
        return 8 * self.blocks_m

    @property
    def tile_n(self) -> int:
        """Output columns of a block."""
        return 64 * self.warps_n

    @property
    def threads(self) -> int:
        """Threads of a block, the copying warp included."""
        return 32 * (self.warps_n * self.warps_k + 1)

    @property
    def parts(self) -> int:
        """Parts that K is split into, over blocks and warps."""
        return self.cluster * self.warps_k

    def stage_bytes(self, problem: Problem) -> int:
        """Bytes of a stage: activations, weights and scales of one chunk for every part."""
        stage = self.warps_k * (_CHUNK // 64 * self.tile_m * 128 + _ROWS * self.warps_n * 512)
        if problem.group:
            kinds = 2 if problem.zeros else 1
            stage += self.warps_k * (_CHUNK // problem.group) * kinds * self.tile_n * 2
        return -(-stage // 1024) * 1024

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block: the aligned ring of stages, or the reduction buffer after it."""
        reduction = self.warps_k * self.tile_m * (self.tile_n + 4) * 4
        return max(self.stages * self.stage_bytes(problem) + 1024, reduction)

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch."""
        return -(-problem.n // self.tile_n) * -(-problem.m // self.tile_m) * self.cluster

    def defines(self, problem: Problem) -> dict[str, object]:
        """The preprocessor definitions of the variant."""
        return {
            "ELEMENT": "Bfloat16" if problem.bfloat16 else "Half",
            "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k,
            "BLOCKS_M": self.blocks_m,
            "GROUP": problem.group,
            "ZEROS": int(problem.zeros),
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "MIN_BLOCKS": self.min_blocks,
        }

    def arguments(self, operands: Operands, dependent: bool) -> MappedArguments:
        """The kernel's parameters."""
        return operands.mapped_arguments(self.tile_m, self.warps_k * _ROWS * self.warps_n * 512, dependent)


def candidates(problem: Problem, device: Device) -> Iterator[BulkConfig]:
    """The variants worth estimating, all of which fit the device's registers and shared memory."""
    if not device.has_clusters:
        return
    blocks_m = 1 if problem.m <= 8 else 2
    short_groups = 0 < problem.group < _CHUNK
    registers = _REGISTERS_NEEDED[blocks_m, problem.zeros] + short_groups * _REGISTERS_OF_SHORT_GROUPS
    chunks = -(-problem.k // _CHUNK)
    for warps_n, warps_k in itertools.product(range(1, 9), (1, 2, 3, 4, 6, 8, 12, 16)):
        if warps_n * warps_k not in _WARPS:
            continue
        for blocks, cluster in itertools.product(range(1, _MAX_BLOCKS + 1), range(1, _MAX_CLUSTER + 1)):
            if registers_of_a_thread(warps_n * warps_k + 1, blocks) < registers:
                continue
            if cluster * warps_k > max(chunks, 4):
                continue
            for stages in (2, 3, 4, 6):
                config = BulkConfig(warps_n, warps_k, blocks_m, cluster, stages, blocks)
                # The barriers, and what the driver keeps of every block, come on top.
                if (config.shared_bytes(problem) + 2048) * blocks <= device.shared_bytes:
                    yield config


def estimate(problem: Problem, device: Device, config: BulkConfig) -> tuple[float, str]:
    """Seconds of a launch, and what the busiest multiprocessor spends them on."""
    grid = config.grid(problem)
    chunks = -(-problem.k // _CHUNK)
    sms = device.multiprocessors
    waves, rest = divmod(grid, device.resident_blocks(config.cluster, config.min_blocks))
    loads = [config.min_blocks] * waves + ([-(-rest // sms)] if rest else [])
    channels = -(-chunks // config.parts) * config.warps_k * _CHUNK
    weights = channels * config.tile_n * (0.5 + problem.scale_bytes_per_weight)
    activations = channels * min(config.tile_m, problem.m) * 2
    cycles = channels // 16 * config.warps_n * _ROW_CYCLES[config.blocks_m]
    seconds, busiest = 2.0e-6 + 0.8e-6 * (len(loads) - 1), ""
    for blocks in loads:
        in_flight = blocks * (config.stages - 1) * config.warps_n * config.warps_k * _ROWS * 512
        times = {
            "weights": blocks * weights / min(device.bandwidth / sms, in_flight / 1.2e-6),
            "activations": blocks * (weights + activations) / (device.cache_bandwidth / sms),
            "instructions": blocks * cycles / device.clock,
        }
        busiest = max(times, key=lambda name: times[name])
        seconds += times[busiest]
    reduced = min(config.tile_m, problem.m) * config.tile_n * 4 * config.warps_k
    return seconds + reduced / 2.0e11 + 0.1e-6 * (config.cluster - 1), busiest
