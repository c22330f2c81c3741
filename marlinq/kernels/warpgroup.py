"""The host's side of the warpgroup kernel (``cuda/w4a16_wgmma.cu``): variants, resources and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from marlinq.kernels.operands import MappedArguments, Operands
from marlinq.kernels.problem import Device, Problem

_CHUNK = 128
_ROWS = 8
# Registers of a multiplying thread beside its accumulators and operand fragments.
_OTHER_REGISTERS = 56
_GROWN_REGISTERS = 224  # with two multiplying warpgroups; the copying one keeps 56 (setmaxnreg)
_TILES_M = (8, 16, 32, 48, 64, 96, 128)
_MAX_STAGES = 8


@dataclass(frozen=True)
class WarpgroupConfig:
    """The compile-time parameters of the warpgroup kernel; see its header comment."""

    tile_m: int
    wide: bool
    groups_n: int
    parts_k: int
    cluster: int
    stages: int
    min_blocks: int = 1

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
    def registers(self) -> int:
        """Registers that a multiplying thread needs."""
        products = 4 if self.wide else 2
        return products * self.tile_m // 2 + products * 8 + _OTHER_REGISTERS

    @property
    def grown_registers(self) -> int:
        """What multiplying warpgroups ask for at their start (setmaxnreg); 0 if the launch gives enough."""
        return _GROWN_REGISTERS if self.multiplying == 2 and self.registers > 160 else 0

    @property
    def fits_registers(self) -> bool:
        """Whether the accumulators fit what a thread can get."""
        given = self.grown_registers or min(255, 65536 // self.threads // 8 * 8)
        return self.registers <= given

    def stage_bytes(self, problem: Problem) -> int:
        """Bytes of a stage: activations, weights and scales of one chunk for every part."""
        stage = self.parts_k * (_CHUNK // 64 * self.tile_m * 128 + _ROWS * self.tile_n * 8)
        if problem.group:
            kinds = 2 if problem.zeros else 1
            stage += self.parts_k * (_CHUNK // problem.group) * kinds * self.tile_n * 2
        return -(-stage // 1024) * 1024

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block: the aligned ring of stages, or the reduction buffer after it."""
        reduction = self.parts_k * self.tile_m * (self.tile_n + 4) * 4
        return max(self.stages * self.stage_bytes(problem) + 1024, reduction)

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch."""
        return -(-problem.n // self.tile_n) * -(-problem.m // self.tile_m) * self.cluster

    def defines(self, problem: Problem) -> dict[str, object]:
        """The preprocessor definitions of the variant."""
        return {
            "ELEMENT": "Bfloat16" if problem.bfloat16 else "Half",
            "TILE_M": self.tile_m,
            "WIDE": int(self.wide),
            "GROUPS_N": self.groups_n,
            "PARTS_K": self.parts_k,
            "GROUP": problem.group,
            "ZEROS": int(problem.zeros),
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "REGISTERS": self.grown_registers,
        }

    def arguments(self, operands: Operands, dependent: bool) -> MappedArguments:
        """The kernel's parameters."""
        return operands.mapped_arguments(self.tile_m, dependent)


def candidates(problem: Problem, device: Device) -> Iterator[WarpgroupConfig]:
    """The variants worth estimating, all of which fit the device's registers and shared memory."""
    if not device.has_warpgroups:
        return
    chunks = -(-problem.k // _CHUNK)
    smallest = next((tile for tile in _TILES_M if tile >= problem.m), _TILES_M[-1])
    for tile_m in (tile for tile in _TILES_M if min(smallest, 64) <= tile <= smallest):
        for wide, groups_n, parts_k in (
            (True, 1, 2),
            (True, 1, 1),
            (True, 2, 1),
            (False, 2, 1),
            (False, 1, 2),
            (False, 1, 1),
            (False, 3, 1),
            (True, 1, 3),
        ):
            for cluster in (1, 2, 3, 4, 5, 6, 8):
                if cluster * parts_k > chunks:
                    continue
                single = WarpgroupConfig(tile_m, wide, groups_n, parts_k, cluster, 1)
                stages = min(_MAX_STAGES, (device.shared_bytes - 2048) // single.stage_bytes(problem))
                config = WarpgroupConfig(tile_m, wide, groups_n, parts_k, cluster, stages)
                fits = config.shared_bytes(problem) <= device.shared_bytes - 1024
                if stages >= 2 and config.fits_registers and fits:
                    yield config


def estimate(problem: Problem, device: Device, config: WarpgroupConfig) -> tuple[float, str]:
    """Seconds of a launch, and what the busiest multiprocessor spends them on."""
    chunks = -(-problem.k // _CHUNK)
    sms = device.multiprocessors
    waves = -(-config.grid(problem) // device.resident_blocks(config.cluster, 1))
    channels = -(-chunks // config.parts) * config.parts_k * _CHUNK
    weights = channels * config.tile_n * (0.5 + problem.scale_bytes_per_weight)
    activations = channels * min(config.tile_m, problem.m) * 2
    times = {
        "weights": weights / (device.bandwidth / sms),
        "activations": (weights + activations) / (device.cache_bandwidth / sms),
        # Fewer than 32 columns take a product no less time.
        "tensor cores": 2.0 * channels * config.tile_n * max(config.tile_m, 32) / (device.tensor_rate / sms),
    }
    busiest = max(times, key=lambda name: times[name])
    reduced = min(config.tile_m, problem.m) * config.tile_n * 4 * config.parts_k
    seconds = 1.6e-6 + waves * times[busiest] + 0.8e-6 * (waves - 1) + waves * reduced / 2.0e11
    return seconds + 0.1e-6 * (config.cluster - 1), busiest
