"""The warpgroup kernel with FP8 activations (``cuda/kernels/warpgroup_fp8.cuh``): its configuration, and the
weights that it refuses.

It is no :class:`~marlinq.kernels.contract.configuration.Variant`, since it rounds activations: decisions
never choose it, callers do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.variants.stages import weight_bytes
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig

GROUP = 128
"""Channels of a chunk and of a weight's groups."""
# Channels whose sums are a chunk.
_SUM_CHANNELS = 32 * GROUP
# Registers of consumer and producer threads after setmaxnreg.
_GROWN = 232, 40
_OTHER_REGISTERS = 48
_MOST_STAGES = 6
# Tiles over the places for tiles in all their waves: from this share on no tile is split (stream-K).
_FULL_WAVES = 0.9


@dataclass(frozen=True)
class WarpgroupFp8Config(WarpgroupConfig):
    """The compile-time parameters of the warpgroup kernel with FP8 activations.

    Attributes:
        chunk_scales: whether activations have a scale for each row and 128 channels; otherwise for each row.
    """

    chunk_scales: bool = True

    variant: ClassVar[str] = "warpgroup-fp8"
    header: ClassVar[str] = "kernels/warpgroup_fp8.cuh"
    function: ClassVar[str] = "w4a8_wgmma"

    def has_store_warps(self, problem: Problem) -> bool:
        """Always, so that one kernel is compiled for all shapes; the warps that multiply store a block's last
        tile."""
        return True

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch: all that run at once, which share the chunks of all tiles evenly; where tiles
        nearly fill the waves, as many as need equal numbers of whole tiles."""
        tiles = self.tiles(problem)
        waves = -(-tiles // self.most_blocks)
        if tiles >= _FULL_WAVES * waves * self.most_blocks:
            return -(-tiles // waves)
        return super().grid(problem)

    def chunks(self, problem: Problem) -> int:
        """Number of chunks of K, those of the activations' sums among them."""
        return super().chunks(problem) + -(-problem.k // _SUM_CHANNELS)

    def scaling(self, problem: Problem) -> str:
        """``SUMS``."""
        return "SUMS"

    def registers(self, problem: Problem) -> int:
        """Registers that a consumer thread needs: sums of the tile and of two units, operands, addresses."""
        return (self.tile_m + min(self.tile_m, 128)) // 2 + _OTHER_REGISTERS

    def _grown(self, problem: Problem) -> tuple[int, int]:
        return _GROWN

    def stage_bytes(self, problem: Problem) -> int:
        """Bytes of a stage: activations, words, scales of columns and of rows, rounded up to 1,024."""
        stage = self.tile_m * (GROUP + 4) + weight_bytes(problem, self.tile_n, self.rows)
        return -(-stage // 1024) * 1024

    def window(self, problem: Problem) -> int:
        """All stages: large batches are bound by the tensor cores."""
        return self.stages

    def instantiation(self, problem: Problem) -> Instantiation:
        """Template and configuration struct to compile for ``problem``."""
        plain = super().instantiation(problem)
        return replace(plain, parameters=(*plain.parameters, ("CHUNK_SCALES", self.chunk_scales)))


def refusal(problem: Problem, device: Device) -> str | None:
    """Why the kernel can't multiply, in one clause; None if it can."""
    if not device.has_warpgroups:
        return f"FP8 activations take a GPU of compute capability 9.0, found {device.architecture}"
    if problem.format != INT4:
        return f"FP8 activations take dense {INT4.name} weights, found {problem.format.name}"
    if problem.zeros:
        return "FP8 activations take symmetric weights, found stored zero points"
    if problem.quant_group != GROUP:
        return f"FP8 activations take groups of {GROUP}, found {problem.granularity.describe()}"
    return None


def configuration(problem: Problem, device: Device, *, chunk_scales: bool) -> WarpgroupFp8Config:
    """The configuration for a product that is not refused."""
    # 256 x 128 dequantises weights half as often as 128 x 256, the other large tile whose sums fit.
    config = WarpgroupFp8Config(
        *(256, 1, 2, 1, 8, 1, 2, 1, device.multiprocessors),
        stream_k=True,
        chunk_scales=chunk_scales,
    )
    room = device.shared_bytes - 2048 - config.bytes_beside_ring(problem)
    return replace(config, stages=min(_MOST_STAGES, room // config.stage_bytes(problem)))
