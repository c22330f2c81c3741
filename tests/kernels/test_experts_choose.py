"""Decisions for routed layers; the kernels they choose compile for every architecture, without spills."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.kernels import ARCHITECTURES
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.instantiation import Instantiation, unit
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8, WeightFormat
from marlinq.kernels.driver.compiler import compile_text
from marlinq.kernels.experts.configurations import (
    DirectConfig,
    DirectDecision,
    ExpertsShape,
    GroupedConfig,
    SortedDecision,
)
from marlinq.kernels.experts.experts_decision import (
    _ROWS_MOST,
    Columns,
    decide_experts,
    decisions,
    direct_variants,
    grouped,
    sorted_variants,
)
from marlinq.kernels.experts.steps import instantiations
from marlinq.kernels.experts.workspace import ExpertsWorkspace, most_tiles
from marlinq.kernels.variants.stream import StreamConfig
from tests.emulation.gemm import AMPERE, H200
from tests.testing.architectures import MAIN_FIRST

of_size = Granularity.from_group_size
QWEN = ExpertsShape(1, 8, 128, 2048, 768, Granularity.group(128), False, False, INT4)
MIXTRAL = ExpertsShape(1, 2, 8, 4096, 14336, Granularity.group(128), False, False, INT4)
GROUPS = ((128, False, False), (32, True, True), (-1, False, True), (64, True, False))


def test_few_rows_are_not_sorted_and_many_are() -> None:
    assert isinstance(decide_experts(QWEN, H200), DirectDecision)
    assert isinstance(decide_experts(replace(QWEN, m=32), H200), SortedDecision)
    assert isinstance(decide_experts(replace(QWEN, m=8), H200), DirectDecision)
    assert isinstance(decide_experts(replace(MIXTRAL, m=2), H200), DirectDecision)
    heights = []
    for m in (64, 256, 1024, 4096, 16384):
        found = decide_experts(replace(QWEN, m=m), H200)
        assert isinstance(found, SortedDecision)
        assert found.down.tile.tile_m == found.tile_m
        heights.append(found.tile_m)
    assert heights == sorted(heights)
    assert heights[0] <= 16
    assert heights[-1] >= 96


def test_parts_are_dealt_to_all_slots() -> None:
    for top in (1, 2, 4, 6, 8):
        found = decide_experts(replace(QWEN, top=top), H200)
        assert isinstance(found, DirectDecision)
        assert found.down.tile.parts % top == 0


def test_gpus_without_wgmma_never_sort() -> None:
    large = replace(AMPERE, architecture="sm_80", shared_bytes=166_912)
    many = decide_experts(replace(QWEN, m=300), large)
    assert isinstance(many, DirectDecision)
    # Not more pairs than a block compares.
    assert many.gate_up.columns == 0
    assert many.down.columns == 8
    # Eight slots a block, whose rings don't fit; there are no clusters.
    with pytest.raises(UnsupportedError, match="8 experts a row with groups of 128: no variant fits sm_86"):
        decide_experts(QWEN, AMPERE)


def test_more_experts_than_are_sorted_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="1000 experts on one GPU: at most 512"):
        decide_experts(replace(QWEN, experts=1000, m=4096), H200)


def test_tiles_of_any_routing_have_room() -> None:
    # One pair an expert, and the rest with one expert, is the worst.
    for m, experts, tile_m in ((1, 128, 16), (40, 8, 16), (1000, 64, 80)):
        shape = replace(QWEN, m=m, experts=experts)
        alone = min(shape.pairs, experts) - 1
        assert alone + -(-(shape.pairs - alone) // tile_m) <= most_tiles(shape, tile_m)


def test_the_workspace_is_one_allocation_without_overlap() -> None:
    shape = replace(QWEN, m=300)
    workspace = ExpertsWorkspace.of(shape, decide_experts(shape, H200), torch.device("cpu"))
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in workspace)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert len({tensor.untyped_storage().data_ptr() for tensor in workspace}) == 1
    assert all(tensor.data_ptr() % 16 == 0 for tensor in workspace)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", MAIN_FIRST)
def test_kernels_for_few_rows_spill_nowhere(architecture: str, whole: bool) -> None:
    """Architectures share the groups but where it is slow."""
    # With two slots, which fit everywhere.
    device = H200 if architecture == "sm_90a" else replace(AMPERE, architecture=architecture)
    groups = GROUPS if whole else GROUPS[ARCHITECTURES.index(architecture) % 4 :: 4]
    spills(small_kernels(device, groups), architecture)


def small_kernels(device: Device, groups: tuple[tuple[int, bool, bool], ...]) -> list[Instantiation]:
    found: list[Instantiation] = []
    for group, zeros, bfloat16 in groups:
        shape = replace(QWEN, m=4, top=2, granularity=of_size(group), zeros=zeros, bfloat16=bfloat16)
        listed = [decision for _, decision in direct_variants(shape, device)]
        assert [decision.down.columns for decision in listed] == [0, 4]
        for decision in listed:
            found += instantiations(shape, decision, "silu", wide=zeros)
    return found


GROUP_SIZES = [32, 64, 128, -1]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_shared_experts_spill_nowhere(group: int) -> None:
    """With as few registers as a variant may have."""
    found: list[Instantiation] = []
    for more, gated in itertools.product((False, True), repeat=2):
        shape = replace(
            MIXTRAL,
            m=4,
            granularity=of_size(group),
            zeros=more,
            bfloat16=more,
            biased=more,
        )
        tile = StreamConfig(2, 2, 1, 8, True, 1, 3, 3)
        config = DirectConfig(tile, gated, shape.top, 8, biased=more)
        found.append(config.instantiation(shape.product(gated=gated), "gelu_tanh", wide=more))
    spills(found, "sm_90a")


def test_rows_that_share_experts_read_them_once() -> None:
    for base in (QWEN, MIXTRAL):
        alone = decide_experts(base, H200)
        assert isinstance(alone, DirectDecision)
        assert not alone.gate_up.columns
        assert not alone.down.columns
    found = decide_experts(replace(MIXTRAL, m=4), H200)
    assert isinstance(found, DirectDecision)
    assert found.gate_up.columns == 4
    assert found.down.columns == 4
    # Groups of four pairs: at most one an expert more than all would fill.
    pairs, tiles = 48, -(-2 * 14336 // found.gate_up.tile.tile_n)
    grid = found.gate_up.grid(MIXTRAL.product(gated=True), 24, 8)
    assert grid == (8 + pairs // 4) * tiles * found.gate_up.tile.cluster
    assert found.down.grid(MIXTRAL.product(gated=False), 17, 8) % 5 == 0


def test_rows_of_many_experts_are_not_compared() -> None:
    many = replace(MIXTRAL, m=4, top=33, experts=64)
    assert not any(decision.gate_up.columns for _, decision in direct_variants(many, H200))


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_grouped_products_spill_nowhere(group: int) -> None:
    """For compute capability 9.0 alone, because they use wgmma. All variants, with their tallest tiles and
    biases: groups of 128 in both types, others in one."""
    found: list[Instantiation] = []
    for bfloat16 in (False, True) if group == 128 else (group == 32,):
        zeros = bfloat16
        shape = replace(
            QWEN,
            m=300,
            granularity=of_size(group),
            zeros=zeros,
            bfloat16=bfloat16,
            biased=True,
        )
        tallest: dict[tuple[int, ...], SortedDecision] = {}
        for _, decision in sorted_variants(shape, H200):
            tile = decision.down.tile
            columns = tile.words, tile.warpgroups_n, tile.min_blocks
            if columns not in tallest or tallest[columns].tile_m < tile.tile_m:
                tallest[columns] = decision
        for decision in tallest.values():
            found += [
                config.instantiation(shape.product(gated=config.gated), "gelu_tanh", wide=False)
                for config in (decision.gate_up, decision.down)
            ]
    spills(found, "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_blocks_that_sort_spill_nowhere(group: int) -> None:
    """As many pairs and experts as they sort at most, with ids of 64 bits and a map."""
    found: list[Instantiation] = []
    for more in (False, True):
        # Four words with zero points and scales of all of K would spill.
        zeros = more and group > 0
        shape = replace(
            QWEN,
            m=16,
            experts=256,
            granularity=of_size(group),
            zeros=zeros,
            bfloat16=more,
            biased=more,
        )
        listed = [decision for _, decision in sorted_variants(shape, H200) if decision.local_sort]
        assert listed
        for decision in listed:
            sorting = instantiations(shape, decision, "gelu_tanh", wide=more)
            found += [one for one in sorting if one.function == "experts_wgmma"]
    spills(found, "sm_90a")


Kind = tuple[WeightFormat, int, bool, bool]
"""Weight format, group size, whether zero points are stored, and whether activations are bfloat16."""
OTHERS: tuple[Kind, ...] = (
    (INT8, 128, True, True),
    (INT8, 64, True, True),
    (INT8, 32, True, False),
    (INT8, -1, True, True),
    (E4M3, -1, False, False),
    (E4M3, 128, False, True),
    (E2M1, 32, False, True),
    (E2M1, 16, False, False),
)


def biased(shape: ExpertsShape, kind: Kind) -> ExpertsShape:
    """``shape`` with biases and with weights of ``kind``."""
    weight_format, group, zeros, bfloat16 = kind
    return replace(
        shape,
        granularity=of_size(group),
        zeros=zeros,
        bfloat16=bfloat16,
        format=weight_format,
        biased=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_few_rows_of_other_formats_spill_nowhere(kind: Kind) -> None:
    shape = biased(replace(MIXTRAL, m=4), kind)
    found: list[Instantiation] = []
    for _, decision in direct_variants(shape, H200):
        found += instantiations(shape, decision, "gelu_tanh", wide=True)
    # With as few registers as a variant may have.
    weight_format, group, *_ = kind
    tile = StreamConfig(2, 2, 1, 8, group != 16, 1, 3, 2 if weight_format.bits == 8 else 3)
    config = DirectConfig(tile, True, shape.top, 8, biased=True)
    spills([*found, config.instantiation(shape.product(gated=True), "gelu_tanh", wide=True)], "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_grouped_products_of_other_formats_spill_nowhere(kind: Kind) -> None:
    """The tallest tiles of every number of columns."""
    shape = biased(replace(QWEN, m=300), kind)
    found = []
    for columns, tile_m in _ROWS_MOST.items():
        for gated in (True, False):
            config = grouped(shape, H200, tile_m, columns, gated=gated)
            if config is not None:
                found.append(config.instantiation(shape.product(gated=gated), "gelu_tanh", wide=False))
    assert len(found) >= 4
    spills(found, "sm_90a")


def tall_tiles(shape: ExpertsShape) -> dict[int, GroupedConfig]:
    """Gated products of 64 to 128 rows by their rows, with the widest blocks."""
    found = {
        rows: grouped(shape, H200, rows, Columns(2, 2, 1), gated=True) for rows in (64, 80, 96, 112, 128)
    }
    return {rows: config for rows, config in found.items() if config is not None}


FLOATS = [
    replace(QWEN, m=300, granularity=of_size(group), format=kind)
    for group, kind in ((16, E2M1), (32, E2M1), (32, E4M3))
]


def test_gated_floats_in_small_groups_have_no_tiles_that_spill() -> None:
    for others in (QWEN, replace(QWEN, format=E4M3)):
        assert list(tall_tiles(replace(others, m=300))) == [64, 80, 96, 112, 128]
    for shape in FLOATS:
        assert list(tall_tiles(shape)) == [64, 80, 112, 128]
        heights = {found.tile_m for _, found in sorted_variants(shape, H200)}
        assert {8, 80, 112, 128} <= heights
        assert 96 not in heights
        for m in (300, 1024, 2048, 4096):
            decision = decide_experts(replace(shape, m=m), H200)
            assert isinstance(decision, SortedDecision)
            assert decision.tile_m != 96


def test_integers_of_8_bits_with_zero_points_have_no_tiles_that_spill() -> None:
    for group, bfloat16, zeros in itertools.product((32, 64, 128, -1), (False, True), (False, True)):
        granularity = of_size(group)
        shape = replace(QWEN, m=16, granularity=granularity, format=INT8, bfloat16=bfloat16, zeros=zeros)
        narrow = [grouped(shape, H200, 8, Columns(4, 1, 2), gated=gated) for gated in (True, False)]
        spilling = zeros and (bfloat16 or group == -1)
        assert [config is None for config in narrow] == [spilling, spilling]
        assert min(found.tile_m for _, found in sorted_variants(shape, H200)) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("shape", FLOATS, ids=["nvfp4", "mxfp4", "mxfp8"])
def test_tall_tiles_of_gated_floats_spill_nowhere(shape: ExpertsShape) -> None:
    """With the activation that takes the most registers, without biases."""
    product = shape.product(gated=True)
    spills([each.instantiation(product, "gelu", wide=False) for each in tall_tiles(shape).values()], "sm_90a")


def test_blocks_sort_few_pairs_of_few_experts() -> None:
    for m, experts, few in ((16, 128, True), (17, 128, False), (16, 256, True), (16, 257, False)):
        listed = sorted_variants(replace(QWEN, m=m, experts=experts), H200)
        assert any(decision.local_sort for _, decision in listed) == few
        assert all(decision.tile_m == 8 for _, decision in listed if decision.local_sort)
    shape = replace(QWEN, m=16)
    chosen = decide_experts(shape, H200)
    assert isinstance(chosen, SortedDecision)
    assert chosen.local_sort
    # No launch sorts, and nothing is left for others but where pairs are.
    functions = [one.function for one in instantiations(shape, chosen, "silu", wide=False)]
    assert functions == ["experts_wgmma", "experts_wgmma", "experts_sum"]
    workspace = ExpertsWorkspace.of(shape, chosen, torch.device("cpu"))
    assert [tensor.numel() for tensor in workspace[:4]] == [0, 0, 0, 128]


@pytest.mark.parametrize("m", [20, 300])
def test_sorting_and_sum_spill_nowhere(m: int) -> None:
    found: list[Instantiation] = []
    for experts, wide in ((8, False), (512, True)):
        shape = replace(QWEN, m=m, experts=experts)
        decision = next(found for _, found in sorted_variants(shape, H200) if not found.local_sort)
        listed = instantiations(shape, decision, "silu", wide=wide)
        found += [one for one in listed if one.function != "experts_wgmma"]
    spills(found, "sm_90a")


def spills(found: list[Instantiation], architecture: str) -> None:
    named = tuple((f"kernel_{number}", one) for number, one in enumerate(dict.fromkeys(found)))
    compiled = compile_text(unit(named), "experts", architecture)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), compiled.log
    assert "C7510" not in compiled.log, "wgmma was serialised"


def test_every_variant_fits_the_multiprocessor() -> None:
    for base, m in itertools.product((QWEN, MIXTRAL), (16, 64)):
        for group, zeros, bfloat16 in GROUPS:
            shape = replace(base, m=m, granularity=of_size(group), zeros=zeros, bfloat16=bfloat16)
            for decision in decisions(shape, H200):
                for config in (decision.gate_up, decision.down):
                    problem = shape.product(gated=config.gated)
                    blocks = config.tile.min_blocks
                    static = config.sorting_bytes if isinstance(config, GroupedConfig) else 0
                    used = config.shared_bytes(problem) + static + 1024
                    assert blocks * used <= H200.shared_bytes + 1024


def test_words_of_one_column_block_can_t_be_gated() -> None:
    config = grouped(replace(QWEN, m=64), H200, 16, Columns(2, 1, 2), gated=True)
    assert isinstance(config, GroupedConfig)
    assert config.shared_bytes(QWEN.product(gated=True)) > config.tile.shared_bytes(QWEN.product(gated=True))
