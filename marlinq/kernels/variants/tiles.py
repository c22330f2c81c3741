"""Tiles and costs shared by the kernels built on ``mma.sync``: warps side by side in N and split over K."""

from __future__ import annotations

from collections.abc import Iterator

from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import INT4

# Where raw codes are multiplied (``cuda/mma/quant_group_sums.cuh``): ``mma.sync`` per row of 16 channels x 64
# columns, one of the five summing activations for the zero point; and the cost of a group's end, as a
# multiple of scaling plain sums.
CODE_PRODUCTS, CODE_CLOSING = 5, 3
# Cost of a group's end for integer digits (``cuda/mma/integer_digits.cuh``), as a multiple of scaling plain
# sums.
DIGIT_CLOSING = 2
# Issue cycles per row of 16 channels x 64 columns for the further shifts of bfloat16 codes, at half rate.
CODE_SHIFTS_BFLOAT16 = 16


def unpacking(problem: Problem) -> float:
    """Issue cycles to unpack a row of 16 channels x 64 columns beyond those of INT4, which was measured."""
    kind = int(problem.bfloat16)
    return 4.0 * (problem.format.unpack[kind] - INT4.unpack[kind])


def holds_pairs(problem: Problem, tile_n: int) -> bool:
    """Whether blocks of ``tile_n`` columns hold gate and up of the same columns.

    The weight alternates 64 columns of gate and 64 of up.
    """
    return tile_n % 128 == 0 and problem.n % 128 == 0


class WarpTiles:
    """A block of ``warps_n`` times ``warps_k`` warps, each with 64 columns and a part of K.

    Attributes:
        warps_n: warps side by side in N.
        warps_k: warps that split the block's slice of K.
        blocks_m: eights of batch rows in a tile.
        rows: rows of 16 channels in a chunk, which a warp takes at a time.
        cluster: blocks that share a tile, each with a slice of K.
    """

    warps_n: int
    warps_k: int
    blocks_m: int
    rows: int
    cluster: int

    @property
    def tile_m(self) -> int:
        """Batch rows of a block."""
        return 8 * self.blocks_m

    @property
    def tile_n(self) -> int:
        """Output columns of a block."""
        return 64 * self.warps_n

    @property
    def chunk(self) -> int:
        """Channels of a chunk, which a warp takes at a time."""
        return 16 * self.rows

    @property
    def parts(self) -> int:
        """Parts that K is split into, over blocks and warps."""
        return self.cluster * self.warps_k

    def describe(self) -> str:
        """Tile and split of K as text for messages."""
        return f"tile {self.tile_m}x{self.tile_n}, K in {self.parts} parts over {self.cluster} blocks"

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch."""
        return -(-problem.n // self.tile_n) * -(-problem.m // self.tile_m) * self.cluster


def cluster_sizes(
    problem: Problem, device: Device, single: WarpTiles, resident: int, *, every: bool
) -> Iterator[int]:
    """Sizes of clusters worth estimating.

    Args:
        problem: the product.
        device: the GPU.
        single: the configuration, with a cluster of one block.
        resident: blocks that fit on a multiprocessor.
        every: include clusters that don't all run at once. Only batch-invariant choices need them; otherwise
            they are never fastest.
    """
    chunks, tiles = -(-problem.k // single.chunk), single.grid(problem)
    fitting = [
        cluster
        for cluster in device.cluster_sizes
        if cluster * single.warps_k <= max(chunks, 4)
        and (every or cluster == 1 or device.runs_at_once(tiles, cluster, resident))
    ]
    # Clusters below half the largest that fits leave multiprocessors idle.
    return (size for size in fitting if every or size == 1 or 2 * size >= fitting[-1])
