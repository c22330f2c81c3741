"""The host's side of the stream kernel (``cuda/w4a16_stream.cu``): variants, resources and cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from marlinq.kernels.operands import Operands, PlainArguments
from marlinq.kernels.problem import Device, Problem
from marlinq.kernels.tiles import WarpTiles

_REGISTERS = 65536
# By (BLOCKS_M, SCALE_SUMS). Registers a thread needs to stay clear of spills (tests/kernels/test_compile.py).
_REGISTERS_NEEDED = {
    (1, True): 96,
    (1, False): 96,
    (2, True): 208,
    (2, False): 128,
    (4, True): 255,
    (4, False): 128,
    (8, False): 240,
}
# Cycles that a multiprocessor needs for one 512-byte row of weights: measured on an H200 for (1, True), (2,
# False) and (4, False), where each further mma.sync takes eight; continued for (8, False). Scaled sums save
# a row's 24 instructions of scaling at a few a group, which has not been measured beyond (1, True): until
# then they come last.
_ROW_CYCLES = {
    (1, True): 37,
    (1, False): 45,
    (2, True): 54,
    (2, False): 53,
    (4, True): 70,
    (4, False): 69,
    (8, False): 105,
}
_WARPS = range(4, 17)


@dataclass(frozen=True)
class StreamConfig(WarpTiles):
    """The compile-time parameters of the stream kernel; see its header comment."""

    warps_n: int
    warps_k: int
    blocks_m: int
    rows: int
    scale_sums: bool
    cluster: int
    stages: int
    min_blocks: int

    source: ClassVar[str] = "w4a16_stream.cu"
    function: ClassVar[str] = "w4a16_stream"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_n * self.warps_k

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block: the ring of stages, or the reduction buffer that follows it."""
        warps = self.warps_n * self.warps_k
        groups = 1 if problem.group == 0 else max(1, self.chunk // problem.group)
        stage = warps * self.rows * 512
        stage += self.warps_k * self.tile_m * self.chunk * 2
        stage += warps * groups * (2 if problem.zeros else 1) * 128
        reduction = self.warps_k * self.tile_m * (self.tile_n + 4) * 4
        return max(self.stages * stage, reduction)

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
            "SCALE_SUMS": int(self.scale_sums),
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "MIN_BLOCKS": self.min_blocks,
        }

    def arguments(self, operands: Operands, dependent: bool) -> PlainArguments:
        """The kernel's parameters."""
        return operands.plain_arguments(dependent)


def candidates(problem: Problem, device: Device, batch_invariant: bool = False) -> Iterator[StreamConfig]:
    """The variants worth estimating, all of which fit the device's registers and shared memory.

    With ``batch_invariant`` they all scale weights and take chunks of the same length, whatever M.
    """
    if batch_invariant:
        blocks_m = 2 if problem.m <= 16 else 4
        registers = 240 if blocks_m == 4 and problem.zeros else _REGISTERS_NEEDED[blocks_m, False]
        yield from _splits(problem, device, blocks_m, scale_sums=False, registers=registers)
        return
    # The largest tile spills with zero points of a single group on some architectures; on 10.x, under NVRTC
    # 13.0, without them too, and with zero points of the smallest groups.
    single, smallest = problem.group == 0, problem.group == 32
    spills = problem.zeros and single
    if device.capability // 10 == 10:
        spills = single or (problem.zeros and smallest)
    largest = 4 if spills else 8
    blocks_m = next((b for b in (1, 2, 4) if 8 * b >= problem.m), largest)
    for scale_sums in _ways_of_scaling(problem, blocks_m):
        registers = _REGISTERS_NEEDED[blocks_m, scale_sums]
        if (blocks_m, scale_sums) == (4, False) and problem.zeros:
            registers = 240
        yield from _splits(problem, device, blocks_m, scale_sums, registers)


def _ways_of_scaling(problem: Problem, blocks_m: int) -> tuple[bool, ...]:
    """Whether sums can be scaled: that takes a second set of accumulators and work at every group's end."""
    if blocks_m == 1:
        return (problem.group != 32,)
    if blocks_m == 2 or (blocks_m == 4 and problem.group in (0, 128)):
        return (False, True)
    return (False,)


def _splits(
    problem: Problem, device: Device, blocks_m: int, scale_sums: bool, registers: int
) -> Iterator[StreamConfig]:
    rows = 4 if blocks_m == 8 else 8
    chunks = -(-problem.k // (16 * rows))
    for warps_n, warps_k in itertools.product(range(1, 9), (1, 2, 3, 4, 6, 8, 12, 16)):
        if warps_n * warps_k not in _WARPS:
            continue
        most = min(3, _REGISTERS // (registers * 32 * warps_n * warps_k))
        for blocks, cluster in itertools.product(range(1, most + 1), device.cluster_sizes):
            if cluster * warps_k > max(chunks, 4):
                continue
            for stages in (3, 4, 6):
                config = StreamConfig(warps_n, warps_k, blocks_m, rows, scale_sums, cluster, stages, blocks)
                if config.shared_bytes(problem) * blocks <= device.shared_bytes:
                    yield config


def estimate(problem: Problem, device: Device, config: StreamConfig) -> tuple[float, str]:
    """Seconds of a launch, and what the busiest multiprocessor spends them on."""
    chunks = -(-problem.k // config.chunk)
    sms = device.multiprocessors
    loads = device.loads(config.grid(problem), config.cluster, config.min_blocks)
    channels = -(-chunks // config.parts) * config.warps_k * config.chunk
    weights = channels * config.tile_n * (0.5 + problem.scale_bytes_per_weight)
    activations = channels * min(config.tile_m, problem.m) * 2
    cycles = channels // 16 * config.warps_n * _ROW_CYCLES[config.blocks_m, config.scale_sums]
    # Launch, the first bytes' way and the drain; every further wave pays the latter two again.
    seconds, busiest = 2.0e-6 + 0.8e-6 * (sum(waves for waves, _ in loads) - 1), ""
    for waves, blocks in loads:
        # Too few bytes in flight can't fill the memory pipe: latency is about a microsecond under load.
        in_flight = blocks * config.threads * config.rows * 16 * (config.stages - 1)
        rate = min(device.bandwidth / sms, in_flight / 1.2e-6)
        times = {
            "weights": blocks * weights / rate,
            "activations": blocks * (weights + activations) / (device.cache_bandwidth / sms),
            "instructions": blocks * cycles / device.clock,
        }
        busiest = max(times, key=lambda name: times[name])
        seconds += waves * times[busiest]
    reduced = min(config.tile_m, problem.m) * config.tile_n * 4 * config.warps_k
    # Larger clusters start later and wait for their slowest block.
    return seconds + reduced / 2.0e11 + 0.1e-6 * (config.cluster - 1), busiest
