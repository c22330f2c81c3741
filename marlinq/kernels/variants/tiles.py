"""What the kernels built on ``mma.sync`` share: warps side by side and one after the other in K."""

from __future__ import annotations

from collections.abc import Iterator

from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import INT4

# Where codes are multiplied as they are (``cuda/mma/quant_group_sums.cuh``): products of a row, one of
# them of the activations alone, and how many times the instructions of scaling plain sums a group's end
# takes.
CODE_PRODUCTS, CODE_CLOSING = 5, 3
# The same of integer products (``cuda/mma/integer_digits.cuh``): two accumulators of four are a row's.
DIGIT_CLOSING = 2
# Issue cycles of the further shifts that a row's bfloat16 codes take, at half rate.
CODE_SHIFTS_BFLOAT16 = 16


def unpacking(problem: Problem) -> float:
    """Issue cycles that a row of weights takes beyond those of 4-bit integers, whose times were measured."""
    kind = int(problem.bfloat16)
    return 4.0 * (problem.format.unpack[kind] - INT4.unpack[kind])


def holds_pairs(problem: Problem, tile_n: int) -> bool:
    """Whether a block of ``tile_n`` columns has gate and up of the same columns: their tiles take turns."""
    return tile_n % 128 == 0 and problem.n % 128 == 0


class WarpTiles:
    """A block of ``warps_n`` times ``warps_k`` warps, each with 64 columns and a part of K.

    Attributes:
        warps_n: warps side by side.
        warps_k: parts that the block's slice of K has.
        blocks_m: blocks of eight batch rows.
        rows: rows of 16 channels that a warp takes at a time.
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
        """Channels of K that a warp takes at a time."""
        return 16 * self.rows

    @property
    def parts(self) -> int:
        """Parts that K is split into, over blocks and warps."""
        return self.cluster * self.warps_k

    def describe(self) -> str:
        """Tile and split, for people."""
        return f"tile {self.tile_m}x{self.tile_n}, K in {self.parts} parts over {self.cluster} blocks"

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch."""
        return -(-problem.n // self.tile_n) * -(-problem.m // self.tile_m) * self.cluster


def cluster_sizes(
    problem: Problem, device: Device, single: WarpTiles, resident: int, *, every: bool
) -> Iterator[int]:
    """Sizes of clusters that are considered for tiles like ``single``, which has a cluster of one block.

    ``resident`` blocks fit a multiprocessor. With ``every`` also clusters that don't all run at once; for a
    batch alone they never win.
    """
    chunks, tiles = -(-problem.k // single.chunk), single.grid(problem)
    fitting = [
        cluster
        for cluster in device.cluster_sizes
        if cluster * single.warps_k <= max(chunks, 4)
        and (every or cluster == 1 or device.runs_at_once(tiles, cluster, resident))
    ]
    # Small clusters leave multiprocessors idle.
    return (size for size in fitting if every or size == 1 or 2 * size >= fitting[-1])
