"""The compile-time parameters of the warpgroup kernel (``cuda/kernels/warpgroup.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from marlinq.kernels.contract.arguments import WarpgroupArguments
from marlinq.kernels.contract.configuration import ActivationBox
from marlinq.kernels.contract.device import registers_of_a_thread
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.whole_rows import (
    PUSHED_COLUMNS,
    SQUARED_COLUMNS,
    MappedRowArguments,
    RowVariant,
)
from marlinq.kernels.variants.pack_arguments import warpgroup_arguments
from marlinq.kernels.variants.stages import chunks_on_their_way, stage_bytes, weight_bytes
from marlinq.kernels.variants.tiles import holds_pairs

# Rows of the largest tile with an RMS norm or a residual stream; larger ones were not measured.
_WHOLE_ROWS_MOST = 64
# Registers of a consumer thread besides accumulators and operand fragments. The keys are words per lane and
# row (:attr:`WarpgroupConfig.words`). Zero points, places of sparse weights, the instruction that subtracts
# and scales at once, stream-K (with zero points: per word) and sums sent to other blocks each add some.
_OTHER_REGISTERS = {1: 48, 2: 42, 4: 48}
_ZERO_REGISTERS = {1: 16, 2: 20, 4: 40}
_FUSED_REGISTERS = {1: 4, 2: 4, 4: 20}
_SPARSE_REGISTERS = {1: 6, 2: 6, 4: 4}
# Registers that sparse weights add to these in tiles of more than 128 rows.
_LARGE_SPARSE_REGISTERS = 3
_STREAM_K_REGISTERS, _STREAM_K_ZERO_REGISTERS = 22, 12
_PUSH_REGISTERS = {1: 12, 2: 12, 4: 28}
# Rows of the largest tile whose sums are scaled instead of its weights; in larger tiles scaling sums costs
# more than it saves on weights. And for float16, rows of the tiles where one instruction that subtracts and
# scales is faster than either (docs/kernels.md, "Scaled sums and scaled codes").
_SCALED_SUMS_MOST = 64
_FUSED_LEAST, _FUSED_MOST = 32, 96
# Rows of a tile, and of a cluster's tiles together, up to which warps send sums to the blocks that own them
# (docs/kernels.md, "Hand-over of sums in a cluster").
_PUSHED_MOST, _PUSHED_ROWS_MOST = 32, 128
# Registers of a consumer and of a producer thread after setmaxnreg, for launches whose even share is too
# small. Keys: number of consumer warpgroups, and whether the producer warpgroup also adds parts of K or
# stores tiles.
_GROWN = {(2, False): (232, 40), (2, True): (224, 56), (3, False): (152, 56), (3, True): (152, 56)}
# Bytes of weights in flight to a multiprocessor whose rings have room for many more.
_ON_THEIR_WAY = 66 * 1024
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
        if problem.format.sparsity is not None:
            needed += _SPARSE_REGISTERS[self.words] + _LARGE_SPARSE_REGISTERS * (self.tile_m > 128)
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
        ring = self.stages * self.stage_bytes(problem) + 1024
        if self.joins_sums(problem) and not self.pushes:
            # The sums overwrite the ring, which is no longer needed.
            return max(ring, self.parts_k * self.tile_m * (self.tile_n + 4) * 4)
        return ring + self.bytes_beside_ring(problem)

    def stage_bytes(self, problem: Problem) -> int:
        """Bytes of a stage of the ring."""
        return stage_bytes(problem, self.tile_m, self.tile_n, self.rows)

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

    def bytes_beside_ring(self, problem: Problem) -> int:
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

    def arguments(self, operands: ProductTensors, dependent: bool) -> WarpgroupArguments:
        """The kernel's parameters."""
        return warpgroup_arguments(operands, self.tile_m, self.tile_n // 64, self.rows, dependent)
