"""Every kernel on the emulation: right against float64, and nothing out of bounds, out of order or stuck."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from emulation.build import Builder
from emulation.launching import EmulatedKernel, Memory, apart
from marlinq.kernels import Device, Problem, batch_invariant, decide, forced_kernel
from marlinq.kernels.choose.decision import estimates
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.launch import gather
from marlinq.kernels.launch.gather import gather_channels
from marlinq.kernels.variants import KERNELS
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.emulation.gemm import AMPERE, H200, SOURCES, Case, bound, run
from tests.kernels.problems import SPREADS, int4_problem
from tests.testing.pairs import every_value, in_turn, slow_but

# (M, N, K, group, zeros, bfloat16, dependent, elements between rows of x): every pair of features with the
# extents that leave tiles, chunks and rings with a rest.
PROBLEMS = [
    (1, 448, 192, 32, False, False, False, 0),
    (9, 64, 320, 32, True, True, True, 8),
    (17, 320, 576, 64, True, False, True, 0),
    (33, 448, 192, -1, False, True, True, 64),
    (70, 192, 1536, 128, True, False, False, 8),
    (1, 576, 896, 128, False, True, True, 0),
    (33, 64, 1152, 64, False, True, False, 8),
    (9, 448, 64, -1, True, False, True, 8),
    (17, 64, 2112, -1, True, True, False, 0),
    (70, 320, 448, 32, False, False, True, 0),
    (177, 448, 256, 128, True, True, True, 8),
]


def right(builder: Builder, case: Case) -> None:
    """Fails unless the emulation gives the case's result."""
    assert run(builder, case) < bound(case.problem), case


def chosen(kernel: str, problem: Problem, device: Device = H200) -> Configuration:
    """The host's own choice among a kernel's variants."""
    with forced_kernel(kernel):
        config = decide(problem, device).config
    assert config is not None
    return config


@pytest.mark.parametrize(("kernel", "values"), in_turn(KERNELS, PROBLEMS), ids=str)
def test_the_variant_that_the_host_chooses(
    builder: Builder, kernel: str, values: tuple[int, int, int, int, bool, bool, bool, int]
) -> None:
    m, n, k, group, zeros, bfloat16, dependent, padding = values
    problem = int4_problem(m, n, k, group, zeros, bfloat16)
    case = Case(problem, chosen(kernel, problem), dependent, not dependent, padding, seed=k)
    right(builder, case)


SPLITS: dict[str, Callable[[Any], bool]] = {
    "clusters": lambda config: config.cluster == 3,
    "parts of a block": lambda config: config.parts in (3, 6) and config.cluster == 1,
    "both": lambda config: config.parts == 4 and config.cluster == 2,
    "side by side": lambda config: config.parts == 1 and config.tile_n >= 256,
    "two blocks a multiprocessor": lambda config: config.min_blocks == 2 and config.parts == 2,
    "four rows a chunk": lambda config: config.rows == 4 and config.parts == 2,
}


@pytest.mark.parametrize(("split", "kernel"), in_turn(list(SPLITS), KERNELS))
def test_ways_of_splitting(builder: Builder, kernel: str, split: str) -> None:
    number = list(SPLITS).index(split)
    m, group, zeros = ((7, 64, True), (16, -1, False), (50, 32, True))[number % 3]
    problem = int4_problem(m, 448, 1088, group, zeros, bfloat16=False)
    found = [config for _, _, config in estimates(problem, H200, kernel) if SPLITS[split](config)]
    if not found and split == "four rows a chunk":
        pytest.skip("the stream kernel has four rows for the largest tile only, which it never splits")
    right(builder, Case(problem, found[0], dependent=number % 2 == 0, seed=number))


# (M, N, K, group, zeros, bfloat16, dependent), a variant, and the activation behind it.
ACTIVATED: list[tuple[tuple[Any, ...], Configuration | None, str]] = [
    ((1, 384, 320, 64, True, False, True), None, "silu"),
    ((4, 640, 1152, 128, False, False, True), None, "silu"),
    ((7, 256, 448, 32, True, True, False), StreamConfig(2, 2, 1, 8, True, 2, 3, 1), "gelu_tanh"),
    ((12, 384, 1088, -1, True, True, True), None, "gelu"),
    ((16, 640, 1152, 128, False, False, True), WarpgroupConfig(16, 4, 1, 2, 8, 1, 4, 1, 132), "silu"),
    ((30, 384, 576, 64, True, True, False), WarpgroupConfig(64, 2, 1, 2, 8, 2, 4, 1, 132), "relu"),
    ((50, 640, 576, 64, False, False, False), WarpgroupConfig(64, 2, 2, 1, 8, 1, 4, 1, 132), "silu"),
    ((70, 384, 320, -1, False, False, True), None, "relu2"),
]


@pytest.mark.parametrize(("values", "config", "activation"), ACTIVATED, ids=str)
def test_an_activation_behind_the_product(
    builder: Builder, values: tuple[Any, ...], config: Configuration | None, activation: str
) -> None:
    *extents, dependent = values
    problem = int4_problem(*extents, activation=activation)
    found = config or decide(problem, H200).config
    assert found is not None
    assert found.activates(problem)
    right(builder, Case(problem, found, dependent, bias=not dependent, x_padding=8, seed=len(activation)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_shallowest_ring(builder: Builder, kernel: str) -> None:
    problem = int4_problem(16, 448, 1088, 64, zeros=True, bfloat16=False)
    config = next(config for _, _, config in estimates(problem, H200, kernel) if config.parts == 1)
    right(builder, Case(problem, replace(config, stages=3 if kernel == "stream" else 2)))


WINDOWS: list[tuple[BulkConfig | WarpgroupConfig, int]] = [
    (BulkConfig(4, 1, 1, 8, 1, 7, 1), 6),
    (BulkConfig(4, 2, 1, 8, 1, 4, 2), 3),
    (WarpgroupConfig(16, 4, 1, 1, 8, 1, 7, 1, 132), 4),
    (WarpgroupConfig(16, 4, 2, 1, 8, 1, 4, 1, 2), 2),
    (WarpgroupConfig(16, 4, 2, 1, 8, 1, 4, 1, 2, stream_k=True), 2),
]


@pytest.mark.parametrize(("values", "dependent"), in_turn(WINDOWS, (True, False)))
def test_fewer_chunks_on_their_way_than_stages(
    builder: Builder, values: tuple[BulkConfig | WarpgroupConfig, int], dependent: bool
) -> None:
    config, window = values
    problem = int4_problem(11, 1088, 1344, 64, zeros=False, bfloat16=False)
    assert config.window(problem) == window < config.stages
    right(builder, Case(problem, config, dependent=dependent))


@pytest.mark.parametrize("blocks", slow_but((1, 2, 5), 2))
def test_blocks_that_take_tile_after_tile(builder: Builder, blocks: int) -> None:
    for m, n, k, words, group in ((20, 1088, 640, 2, 128), (20, 832, 320, 4, -1), (40, 320, 576, 1, 64)):
        problem = int4_problem(m, n, k, group, zeros=True, bfloat16=blocks == 2)
        config = WarpgroupConfig(16 if words == 1 else 8, words, 1, 1, 8, 1, 2, 1, blocks)
        assert config.tiles(problem) > 2 * blocks
        right(builder, Case(problem, config, dependent=words == 4, seed=blocks))


@pytest.mark.parametrize("blocks", [1, 5])
def test_bands_of_tiles(builder: Builder, blocks: int) -> None:
    # Five tiles of the batch a band, three in the last one.
    problem = int4_problem(7 * 176 + 9, 128, 64, 32, zeros=False, bfloat16=False)
    config = WarpgroupConfig(176, 1, 1, 1, 4, 1, 2, 1, blocks)
    right(builder, Case(problem, config))


@pytest.mark.parametrize(
    ("split", "group"), in_turn(((2, 1, 1), (3, 1, 1), (1, 2, 1), (2, 1, 3)), (-1, 32, 128))
)
def test_warpgroups_of_64_columns(builder: Builder, split: tuple[int, int, int], group: int) -> None:
    warpgroups_n, parts_k, cluster = split
    problem = int4_problem(45, 320, 768, group, zeros=group != 128, bfloat16=group == -1)
    config = WarpgroupConfig(32, 1, warpgroups_n, parts_k, 8, cluster, 4, 1, 3)
    right(builder, Case(problem, config, bias=group == 32, x_padding=8, seed=warpgroups_n))


# (M, N, K, group, zeros, tile_m, words, warpgroups_n, rows, most blocks), and what the blocks' runs are like.
EVEN = {
    "more blocks than tiles": (11, 320, 1344, 64, True, 16, 2, 1, 8, 5),
    "a tile for many blocks": (11, 192, 2112, 32, False, 8, 4, 1, 4, 132),
    "a run for every tile": (20, 512, 1024, 128, False, 16, 2, 1, 8, 4),
    "runs that end with tiles": (40, 256, 384, 64, True, 16, 2, 2, 8, 2),
    "whole tiles beside runs": (50, 832, 320, 32, True, 16, 2, 1, 8, 3),
    "many whole tiles": (70, 576, 448, -1, True, 8, 4, 1, 4, 2),
    "a single block": (9, 192, 576, 64, False, 16, 2, 1, 8, 1),
    "columns and rows past the end": (33, 192, 832, -1, False, 16, 4, 2, 8, 7),
    "warpgroups of 64 columns": (40, 320, 576, 64, True, 16, 1, 2, 8, 7),
}


# Every time: tiles that blocks share, whole tiles beside such, and both past the last row and column.
@pytest.mark.parametrize(
    "name",
    slow_but(EVEN, "more blocks than tiles", "whole tiles beside runs", "columns and rows past the end"),
)
def test_tiles_dealt_out_in_chunks(builder: Builder, name: str) -> None:
    dependent = list(EVEN).index(name) % 2 == 1
    m, n, k, group, zeros, tile_m, words, warpgroups_n, rows, most = EVEN[name]
    problem = int4_problem(m, n, k, group, zeros, bfloat16=dependent)
    config = WarpgroupConfig(tile_m, words, warpgroups_n, 1, rows, 1, 3, 1, most, stream_k=True)
    # One at a time in order, and as many as may run at once; twice on the same flags.
    for resident in (1, 4):
        case = Case(problem, config, dependent, bias=not dependent, x_padding=8, resident=resident)
        right(builder, replace(case, launches=2, seed=resident))


@pytest.mark.parametrize(
    ("columns", "spread"), in_turn(((4, 1, 1, True), (2, 1, 2, False), (1, 2, 1, True)), list(SPREADS))
)
def test_scales_of_every_spread(builder: Builder, columns: tuple[int, int, int, bool], spread: str) -> None:
    words, warpgroups_n, parts_k, even = columns
    # Three to six groups' scales a chunk and one, and every lane's columns normalised by themselves.
    group = {4: 32, 2: 64, 1: 128}[words]
    problem = int4_problem(19, 320, 1152, group, zeros=False, bfloat16=False)
    config = WarpgroupConfig(32, words, warpgroups_n, parts_k, 8, 1, 4, 1, 5, even)
    assert config.scaling(problem) == "FUSED"
    right(builder, Case(problem, config, seed=words, spread=spread))
    bfloat16 = replace(problem, bfloat16=True)
    right(builder, Case(bfloat16, config, dependent=True, seed=words, spread=spread))


@pytest.mark.parametrize(
    ("split", "group", "loud"),
    every_value(list(product(((1, 4, 1), (1, 4, 3), (3, 2, 2)), (32, 64, 128, -1), (False, True)))),
)
def test_one_row_in_whole_numbers(
    builder: Builder, split: tuple[int, int, int], group: int, loud: bool
) -> None:
    warps_n, warps_k, cluster = split
    # Columns past the last tile; a last chunk of 64 channels where groups allow it.
    for bfloat16 in (False, True):
        zeros = (group in (32, -1)) != bfloat16
        problem = int4_problem(1, 320, 1408 if group == 128 else 1344, group, zeros, bfloat16)
        config = StreamConfig(warps_n, warps_k, 1, 8, True, cluster, 3, 1, digits=True)
        case = Case(
            problem, config, dependent=cluster == 2, bias=not loud, x_padding=3, seed=group, loud=loud
        )
        right(builder, case)


def test_registers_that_change_hands(builder: Builder) -> None:
    problem = int4_problem(112, 512, 384, 64, zeros=False, bfloat16=False)
    growing = [
        config
        for _, _, config in estimates(problem, H200, "warpgroup")
        if isinstance(config, WarpgroupConfig) and config.grown_registers(problem) != (0, 0)
    ]
    right(builder, Case(problem, growing[0]))


def test_batch_invariant_sums(builder: Builder) -> None:
    for m in (1, 33):
        problem = int4_problem(m, 192, 1088, 64, zeros=True, bfloat16=False)
        with batch_invariant():
            right(builder, Case(problem, chosen("stream", problem)))


@pytest.mark.parametrize("m", [1, 9, 33])
def test_gpus_without_clusters(builder: Builder, m: int) -> None:
    problem = int4_problem(m, 320, 832, 64, zeros=m == 9, bfloat16=m == 33)
    right(builder, Case(problem, chosen("stream", problem, AMPERE), capability=AMPERE.capability))


def test_no_bias_and_a_single_row_of_any_stride(builder: Builder) -> None:
    for kernel in KERNELS:
        problem = int4_problem(1, 128, 256, 128, zeros=False, bfloat16=False)
        right(builder, Case(problem, chosen(kernel, problem), bias=False, x_padding=3))


@pytest.mark.parametrize("dependent", [False, True])
def test_channels_in_activation_order(builder: Builder, dependent: bool) -> None:
    x = apart(torch.randn(3, 100).half())
    order = apart(torch.randperm(208, dtype=torch.int32) - 108)
    out = apart(torch.full((3, 208), torch.nan).half())
    memory = [
        Memory("x", x, after_previous=True),
        Memory("order", order),
        Memory("out", out, writable=True, after_previous=True),
    ]

    class Emulated:
        def __init__(
            self,
            _: object,
            grid: int,
            threads: int,
            shared: int,
            arguments: ctypes.Structure,
            *,
            dependent: bool,
        ) -> None:
            self.arguments, self.shape, self.dependent = arguments, (grid, threads, shared), dependent
            text = gather.INSTANTIATION.text()
            self.kernel = EmulatedKernel(builder.kernel(text, "gather", SOURCES))

        def take(self) -> Emulated:
            return self

        def start(self) -> None:
            self.kernel.launch(*self.shape, self.arguments, memory, dependent=self.dependent)

        def give(self, launch: Emulated) -> None:
            assert launch is self

    gather._launches.cache_clear()
    with (
        mock.patch("marlinq.kernels.launch.gather.Launches", Emulated),
        mock.patch("marlinq.kernels.launch.gather._function"),
        mock.patch("marlinq.kernels.launch.gather.on_device"),
        mock.patch("marlinq.kernels.launch.gather.overlaps", return_value=dependent),
        mock.patch("torch.empty", return_value=out),
    ):
        found = gather_channels(x, order)
    gather._launches.cache_clear()
    assert torch.equal(found, torch.where(order >= 0, x[:, order.clamp(min=0).long()], 0))
