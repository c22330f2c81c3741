"""Routed layers on the emulation: sorted rightly, right against float64, in bounds and in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from emulation.build import Builder
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT8
from marlinq.kernels.experts.configurations import DirectConfig, DirectDecision, ExpertsShape, SortedDecision
from marlinq.kernels.experts.experts_decision import Columns, decide_experts, grouped
from marlinq.kernels.experts.experts_reference import local_experts
from marlinq.kernels.experts.steps import shape_of
from marlinq.kernels.variants.stream import StreamConfig
from tests.emulation.experts import Routed, run_layer
from tests.emulation.gemm import H200
from tests.kernels.experts_problems import Shape, random_layer, random_routing
from tests.kernels.problems import BOUND, relative_error
from tests.testing.pairs import in_turn, slow_but

SMALL = replace(H200, multiprocessors=3)


def decision(
    shape: ExpertsShape, tile_m: int, words: int = 2, warpgroups: int = 1, *, local_sort: bool = False
) -> SortedDecision:
    """Tiles of ``tile_m`` rows on three multiprocessors, so that blocks take several."""
    columns = Columns(words, warpgroups, 2 if warpgroups == 1 else 1)
    gate_up, down = (
        grouped(shape, SMALL, tile_m, columns, gated=gated, local_sort=local_sort) for gated in (True, False)
    )
    assert gate_up is not None
    assert down is not None
    return SortedDecision(gate_up, down, "a test's")


def check_places(routed: Routed, local: torch.Tensor) -> None:
    """Places are those of a stable sort by expert."""
    flat = local.flatten()
    order = torch.argsort(torch.where(flat < 0, 1 << 20, flat), stable=True)
    expected = torch.full_like(flat, -1)
    here = int((flat >= 0).sum())
    expected[order[:here]] = torch.arange(here)
    assert torch.equal(routed.workspace.places.flatten().long(), expected)


def check_sorted(routed: Routed, local: torch.Tensor, tile_m: int) -> None:
    """And records are those of its tiles."""
    check_places(routed, local)
    flat = local.flatten()
    records, first_row = [], 0
    for expert in range(int(flat.max()) + 1):
        rows = int((flat == expert).sum())
        tiles = -(-rows // tile_m)
        records += [[expert, len(records), first_row, rows]] * tiles
        first_row += rows
    assert int(routed.workspace.tiles) == len(records)
    assert routed.workspace.records[: len(records)].tolist() == records


# (M, shape, tile_m, words, warpgroups, skew)
LAYERS = {
    "one row": (1, Shape(5, 3, 128, 64, 64), 16, 2, 1, 0.0),
    "empty experts": (6, Shape(9, 2, 128, 128, 32, True), 16, 2, 1, 1.0),
    "several tiles an expert": (45, Shape(3, 2, 192, 64, 64), 16, 2, 1, 1.0),
    "more slots than are summed at once": (3, Shape(12, 10, 192, 64, 64), 16, 2, 1, 0.0),
    "bfloat16": (20, Shape(4, 2, 256, 128, 128, False, torch.bfloat16), 32, 2, 1, 0.0),
    "bfloat16 with zero points": (20, Shape(4, 2, 256, 128, -1, True, torch.bfloat16), 32, 2, 1, 0.0),
    "side by side": (40, Shape(2, 1, 128, 192, -1), 32, 2, 2, 0.0),
    "four words": (20, Shape(3, 2, 320, 192, 64), 8, 4, 1, 0.0),
    "four words side by side": (20, Shape(3, 2, 192, 320, 32, True), 16, 4, 2, 0.0),
    "large tiles": (150, Shape(2, 2, 128, 64, 32), 128, 2, 2, 2.0),
    "int8": (30, Shape(3, 2, 192, 128, 64, True, format=INT8), 16, 2, 1, 1.0),
    "int8 in bfloat16": (9, Shape(3, 2, 192, 128, 64, False, torch.bfloat16, format=INT8), 8, 4, 1, 1.0),
    "fp8": (30, Shape(3, 2, 192, 128, -1, format=E4M3), 16, 2, 1, 1.0),
    "mxfp4": (30, Shape(3, 2, 192, 128, 32, False, torch.bfloat16, format=E2M1), 32, 2, 1, 1.0),
    "nvfp4": (9, Shape(3, 2, 192, 128, 16, format=E2M1), 8, 4, 1, 1.0),
}


# Every time: more tiles than experts, both 16-bit types, and every number of words and warpgroups.
@pytest.mark.parametrize(
    "name",
    slow_but(
        LAYERS,
        *("several tiles an expert", "bfloat16 with zero points", "four words side by side"),
        "more slots than are summed at once",
        "int8",
    ),
)
def test_layers(builder: Builder, name: str) -> None:
    m, shape, tile_m, words, warpgroups, skew = LAYERS[name]
    torch.manual_seed(m)
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, m, skew=skew)
    chosen = decision(shape_of(x, ids, layer.weights), tile_m, words, warpgroups)
    routed = run_layer(builder, chosen, x, ids, weights, layer.weights, seed=m)
    check_sorted(routed, local_experts(ids, shape.experts, None), tile_m)
    # Between the products numbers are rounded to 16 bits once more, and the sums of a row's experts once.
    error = relative_error(routed.out, layer.reference(x, ids, weights))
    assert error < 2 * BOUND[shape.dtype]


# (M, shape, words, warpgroups, experts of the router, whether ids have 64 bits)
HERE = {
    "one row": (1, Shape(5, 3, 320, 192, 64), 4, 1, 5, False),
    "empty experts": (5, Shape(40, 4, 128, 192, 32, True), 4, 1, 40, True),
    "several tiles an expert": (45, Shape(3, 2, 192, 128, 64), 4, 1, 3, False),
    "experts elsewhere": (16, Shape(33, 8, 192, 128, 64), 4, 1, 50, False),
    "side by side": (30, Shape(6, 2, 128, 192, -1, False, torch.bfloat16), 4, 2, 9, False),
}


@pytest.mark.parametrize("name", slow_but(HERE, "empty experts", "experts elsewhere"))
def test_blocks_sort_few_pairs(builder: Builder, name: str) -> None:
    m, shape, words, warpgroups, known, wide = HERE[name]
    torch.manual_seed(m)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=known), m, skew=0.5)
    expert_map = None
    if known > shape.experts:
        expert_map = torch.full((known,), -1, dtype=torch.int32)
        expert_map[torch.randperm(known)[: shape.experts]] = torch.arange(shape.experts, dtype=torch.int32)
    # Rows that are further apart than their channels, as a decode step's are.
    x = torch.nn.functional.pad(x, (0, 64))[:, : shape.hidden]
    given = x, ids.long() if wide else ids, weights
    chosen = decision(shape_of(x, ids, layer.weights), 8, words, warpgroups, local_sort=True)
    routed = run_layer(builder, chosen, *given, layer.weights, "silu", expert_map, seed=m)
    check_places(routed, local_experts(ids, shape.experts, expert_map))
    error = relative_error(routed.out, layer.reference(x, ids, weights, "silu", expert_map))
    assert error < 2 * BOUND[shape.dtype]


def test_the_decision_of_the_host(builder: Builder) -> None:
    shape = Shape(6, 2, 192, 128, 64)
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 7)
    chosen = decide_experts(shape_of(x, ids, layer.weights), H200)
    routed = run_layer(builder, chosen, x, ids.long(), weights, layer.weights, "gelu_tanh")
    error = relative_error(routed.out, layer.reference(x, ids, weights, "gelu_tanh"))
    assert error < 2 * BOUND[shape.dtype]


# (M, shape, (columns, parts of a block, cluster) of gate and up, and of down)
DIRECT = {
    "one row": (1, Shape(5, 3, 256, 192, 64), (1, 4, 1), (1, 3, 1)),
    "clusters": (2, Shape(4, 2, 256, 128, 32, True), (1, 2, 2), (1, 2, 2)),
    "parts of a slot": (3, Shape(4, 2, 576, 320, 64), (2, 2, 1), (3, 4, 1)),
    "bfloat16": (2, Shape(3, 2, 384, 256, 128, False, torch.bfloat16), (5, 1, 3), (1, 1, 6)),
    "one group": (2, Shape(3, 1, 192, 128, -1, True), (1, 6, 1), (2, 2, 1)),
    "int8": (3, Shape(4, 2, 256, 192, 64, True, format=INT8), (1, 2, 2), (1, 4, 1)),
    "without digits, as on other GPUs": (3, Shape(4, 2, 256, 192, 64), (1, 2, 2), (1, 4, 1)),
    "fp8": (3, Shape(4, 2, 256, 192, -1, False, torch.bfloat16, format=E4M3), (1, 2, 2), (1, 4, 1)),
    "mxfp4": (3, Shape(4, 2, 256, 192, 32, format=E2M1), (1, 2, 2), (1, 4, 1)),
    "nvfp4": (3, Shape(4, 2, 256, 192, 16, False, torch.bfloat16, format=E2M1), (1, 2, 2), (1, 4, 1)),
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        DIRECT,
        *("one row", "clusters", "parts of a slot", "bfloat16", "one group"),
        *("without digits, as on other GPUs", "nvfp4"),
    ),
)
def test_pairs_as_they_come(builder: Builder, name: str) -> None:
    m, shape, *splits = DIRECT[name]
    torch.manual_seed(m)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=shape.experts + 1), m)
    configs = [
        DirectConfig(
            StreamConfig(
                *(warps_n, warps_k, 1, 8, shape.group_size != 16, cluster, 3, 1),
                digits=shape.format.sums_codes and not name.startswith("without"),
            ),
            gated,
            shape.top,
        )
        for (warps_n, warps_k, cluster), gated in zip(splits, (True, False), strict=True)
    ]
    chosen = DirectDecision(configs[0], configs[1], "a test's")
    routed = run_layer(builder, chosen, x, ids.long() if m == 2 else ids, weights, layer.weights, seed=m)
    error = relative_error(routed.out, layer.reference(x, ids, weights))
    assert error < 2 * BOUND[shape.dtype]


# (M, columns of a product, shape, (columns, parts of a block, cluster) of gate and up, and of down)
SHARED = {
    "two rows": (2, 2, Shape(5, 3, 256, 192, 64), (1, 4, 1), (1, 4, 1)),
    "more rows of an expert than columns": (20, 8, Shape(2, 1, 256, 128, 32, True), (1, 2, 2), (1, 2, 2)),
    "tiles of rows": (11, 4, Shape(6, 3, 576, 320, 64), (2, 2, 1), (3, 4, 1)),
    "bfloat16": (5, 8, Shape(3, 2, 384, 256, 128, False, torch.bfloat16), (5, 1, 3), (1, 1, 6)),
    "one group": (9, 4, Shape(3, 1, 192, 128, -1, True), (1, 6, 1), (2, 2, 1)),
    "more pairs than threads": (21, 8, Shape(9, 8, 128, 64, 64), (1, 4, 1), (1, 4, 1)),
    "int8": (5, 4, Shape(4, 2, 256, 192, 64, True, format=INT8), (1, 2, 2), (1, 4, 1)),
    "fp8": (5, 4, Shape(4, 2, 256, 192, -1, False, torch.bfloat16, format=E4M3), (1, 2, 2), (1, 4, 1)),
    "mxfp4": (5, 4, Shape(4, 2, 256, 192, 32, format=E2M1), (1, 2, 2), (1, 4, 1)),
    "nvfp4": (5, 4, Shape(4, 2, 256, 192, 16, False, torch.bfloat16, format=E2M1), (1, 2, 2), (1, 4, 1)),
}


def shared_decision(
    top: int,
    columns: int,
    splits: list[tuple[int, int, int]],
    *,
    biased: bool = False,
    scale_sums: bool = True,
) -> DirectDecision:
    configs = [
        DirectConfig(
            StreamConfig(warps_n, warps_k, 1, 8, scale_sums, cluster, 3, 1), gated, top, columns, biased
        )
        for (warps_n, warps_k, cluster), gated in zip(splits, (True, False), strict=True)
    ]
    return DirectDecision(configs[0], configs[1], "a test's")


@pytest.mark.parametrize(
    "name",
    slow_but(SHARED, "two rows", "more rows of an expert than columns", "tiles of rows", "nvfp4"),
)
def test_pairs_that_share_experts(builder: Builder, name: str) -> None:
    m, columns, shape, *splits = SHARED[name]
    torch.manual_seed(m)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=shape.experts + 1), m)
    # A router names no expert twice in a row, but the operator takes it.
    if shape.top > 1:
        ids[1, 1] = ids[1, 0]
    chosen = shared_decision(shape.top, columns, splits, scale_sums=shape.group_size != 16)
    routed = run_layer(builder, chosen, x, ids.long() if m == 2 else ids, weights, layer.weights, seed=m)
    error = relative_error(routed.out, layer.reference(x, ids, weights))
    assert error < 2 * BOUND[shape.dtype]


@pytest.mark.parametrize("together", [False, True])
def test_experts_in_other_memory(builder: Builder, together: bool) -> None:
    """The last two of five experts, with zero points; every row takes the last one."""
    shape = Shape(5, 3, 256, 192, 64, True)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=4, top=2), 5)
    ids = torch.cat((ids, torch.full((5, 1), 4, dtype=ids.dtype)), 1)
    weights = torch.cat((weights, torch.ones(5, 1)), 1)
    alone = (
        DirectConfig(StreamConfig(1, parts, 1, 8, True, 1, 3, 1, True), gated, 3)
        for parts, gated in ((2, True), (3, False))
    )
    chosen = (
        shared_decision(3, 4, [(1, 4, 1), (1, 4, 1)])
        if together
        else DirectDecision(*alone, reason="a test's")
    )
    routed = run_layer(builder, chosen, x, ids, weights, layer.weights, further=2)
    assert relative_error(routed.out, layer.reference(x, ids, weights)) < 2 * BOUND[shape.dtype]


def test_sorted_experts_lie_in_one_memory(builder: Builder) -> None:
    shape = Shape(4, 2, 128, 64, 64)
    layer = random_layer(shape)
    given = random_routing(shape, 3)
    with pytest.raises(ValueError, match="experts in other memory"):
        run_layer(
            builder, decision(shape_of(*given[:2], layer.weights), 16), *given, layer.weights, further=1
        )


@pytest.mark.parametrize(
    ("way", "activation"), in_turn(("alone", "together", "sorted"), ("silu", "clamped_swiglu"))
)
def test_biases(builder: Builder, way: str, activation: str) -> None:
    """GPT-OSS's activation, with the gate's clamp, which activations of this size reach."""
    shape = Shape(4, 2, 256, 192, 64, False, torch.bfloat16, True)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=shape.experts + 1), 9)
    x *= 3
    direct = {
        "alone": DirectDecision(
            *(
                DirectConfig(
                    StreamConfig(1, 2, 1, 8, True, cluster, 3, 1, True), gated, shape.top, biased=True
                )
                for gated, cluster in ((True, 1), (False, 2))
            ),
            "a test's",
        ),
        "together": shared_decision(2, 8, [(2, 2, 2), (1, 4, 1)], biased=True),
    }
    chosen = direct.get(way) or decision(shape_of(x, ids, layer.weights), 16)
    routed = run_layer(builder, chosen, x, ids, weights, layer.weights, activation)
    expected = layer.reference(x, ids, weights, activation)
    assert relative_error(routed.out, expected) < 2 * BOUND[shape.dtype]


@pytest.mark.parametrize("here", [0, 1])
def test_shared_experts_that_are_elsewhere(builder: Builder, here: int) -> None:
    shape = Shape(3, 2, 128, 128, 64)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=8), 10)
    ids[0] = torch.tensor([-1, 99], dtype=torch.int32)
    expert_map = torch.full((8,), -1, dtype=torch.int32)
    expert_map[[3, 5][: here * 2]] = torch.tensor([1, 0], dtype=torch.int32)[: here * 2]
    chosen = shared_decision(2, 8, [(1, 2, 2), (1, 4, 1)])
    routed = run_layer(builder, chosen, x, ids, weights, layer.weights, expert_map=expert_map)
    assert not routed.out[0].any()
    expected = layer.reference(x, ids, weights, expert_map=expert_map)
    assert (routed.out.double() - expected).norm() <= 2 * BOUND[shape.dtype] * expected.norm()


@pytest.mark.parametrize("m", [9, 700])
def test_experts_that_are_elsewhere(builder: Builder, m: int) -> None:
    # 1400 pairs are divided among two blocks.
    shape = Shape(3, 2, 64, 64, 64)
    layer = random_layer(shape)
    x, ids, weights = random_routing(replace(shape, experts=8), m)
    ids[0] = torch.tensor([-1, 99], dtype=torch.int32)
    expert_map = torch.tensor([-1, 2, -1, 0, -1, -1, 1, 3], dtype=torch.int32)
    chosen = decision(shape_of(x, ids, layer.weights), 64)
    routed = run_layer(builder, chosen, x, ids, weights, layer.weights, expert_map=expert_map)
    local = local_experts(ids, shape.experts, expert_map)
    check_sorted(routed, local, 64)
    assert not routed.out[0].any()
    expected = layer.reference(x, ids, weights, expert_map=expert_map)
    assert relative_error(routed.out, expected) < 2 * BOUND[shape.dtype]


def test_no_expert_is_here(builder: Builder) -> None:
    shape = Shape(3, 2, 64, 64, 64)
    layer = random_layer(shape)
    x, ids, weights = random_routing(shape, 5)
    expert_map = torch.full((3,), -1, dtype=torch.int32)
    chosen = decision(shape_of(x, ids, layer.weights), 16)
    routed = run_layer(builder, chosen, x, ids, weights, layer.weights, expert_map=expert_map)
    assert int(routed.workspace.tiles) == 0
    assert not routed.out.any()
