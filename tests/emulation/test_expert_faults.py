"""Faults planted into the kernels of experts: the emulation, or the result, has to tell every one of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from marlinq.kernels.experts.choose import DirectConfig, DirectDecision, ExpertsDecision
from marlinq.kernels.experts.launch import shape_of
from marlinq.kernels.variants.stream import StreamConfig
from tests.emulation.build import Builder
from tests.emulation.experts import run_layer
from tests.emulation.gemm import SOURCES
from tests.emulation.launching import KernelFault
from tests.emulation.test_experts import decision
from tests.kernels.experts_problems import Shape, random_layer, random_routing
from tests.kernels.problems import BOUND, relative_error
from tests.testing.pairs import first_of_each

WRONG = "the result is wrong"
EARLY = "without waiting for the previous kernel"
SHAPE = Shape(4, 2, 192, 128, 64)


class Fault(NamedTuple):
    """A fault: in which kernel and file, what becomes what, and what has to be said of it; ``here`` where
    blocks sort pairs themselves."""

    function: str
    file: str
    old: str
    new: str
    reported: str
    here: bool = False


ROUTE, WGMMA, SUM = "experts/route.cuh", "kernels/experts_warpgroup.cuh", "experts/sum.cuh"
STREAM, RECORDS = "kernels/experts_stream.cuh", "experts/records.cuh"
SHARED, FEW = "kernels/experts_shared.cuh", "experts/few_pairs.cuh"
FAULTS = {
    "ids too early": Fault("experts_route", ROUTE, "        wait_for_previous_kernel();\n", "", EARLY),
    "counts before zeros": Fault(
        "experts_route",
        ROUTE,
        "        __syncthreads();\n        const u32 same",
        "        const u32 same",
        "without waiting for it",
    ),
    "equal pairs at one place": Fault(
        "experts_route", ROUTE, " + rank;\n        own_places", ";\n        own_places", "second time"
    ),
    "records too early": Fault(
        "experts_wgmma",
        WGMMA,
        "();\n            if (behind_route) wait_for_previous_kernel();\n            const StoredRecords",
        "();\n            const StoredRecords",
        EARLY,
    ),
    "activations too early": Fault(
        "experts_wgmma",
        WGMMA,
        "if (dependent) wait_for_previous_kernel();\n            ring = first",
        "ring = first",
        EARLY,
    ),
    "another expert's words": Fault("experts_wgmma", WGMMA, "plane(at.expert * (K / 16))", "plane(0)", WRONG),
    "rows of the next expert": Fault(
        "experts_wgmma", RECORDS, "min(TileM, record.rows - at.m0)", "TileM", "second time|out of bounds"
    ),
    "sums too early": Fault("experts_sum", SUM, "    wait_for_previous_kernel();\n", "", EARLY),
    "rows of pairs that are elsewhere": Fault(
        "experts_sum", SUM, "if (place < 0) continue;", "", "out of bounds"
    ),
    "a choice too early": Fault(
        "experts_stream", STREAM, "if (dependent) wait_for_previous_kernel();", "", EARLY
    ),
    "another slot's activations": Fault("experts_stream", STREAM, "x += slot * weights.K;", "", WRONG),
    "no routing weight": Fault("experts_stream", STREAM, "(gate.x, up.x) * weight", "(gate.x, up.x)", WRONG),
    "a shared choice too early": Fault(
        "experts_shared", SHARED, "if (dependent) wait_for_previous_kernel();", "", EARLY
    ),
    "activations of shared experts too early": Fault(
        "experts_shared",
        SHARED,
        "fetch_weights(0);\n            wait_for_previous_kernel();",
        "fetch_weights(0);",
        EARLY,
    ),
    "groups before their pairs are compared": Fault(
        "experts_shared",
        SHARED,
        "        __syncthreads();\n        int groups = 0;",
        "        int groups = 0;",
        "without waiting for it|may still be reading",
    ),
    "an expert twice in one column": Fault(
        "experts_shared",
        SHARED,
        "again && expert >= 0 ? -2 - t : expert",
        "expert",
        WRONG + "|second time|without",
    ),
    "a segment's weights for the next": Fault(
        "experts_shared",
        SHARED,
        "if (++weights_chunk == of_segment && step + 1 < my_steps) weights_chunk = 0, ++weights_segment,"
        " enter_weights();",
        "++weights_chunk;",
        WRONG + "|out of bounds",
    ),
    "a row's pairs in other rows' columns": Fault(
        "experts_shared", SHARED, "pair < 0 ? -1 : (GATED", "pair < 0 ? 0 : (GATED", WRONG
    ),
    "ids too early for blocks that sort": Fault(
        "experts_wgmma",
        WGMMA,
        "pairs.clear();\n            if (behind_route) wait_for_previous_kernel();",
        "pairs.clear();",
        EARLY,
        here=True,
    ),
    "experts compared before all are there": Fault(
        "experts_wgmma",
        FEW,
        "        __syncthreads();\n\n        // Rows in",
        "        // Rows in",
        "without waiting for it|may still be reading",
        here=True,
    ),
    "equal pairs at the first one's place": Fault(
        "experts_wgmma",
        FEW,
        "first_rows[mine] + of_warps[warp * Experts + mine] + rank",
        "first_rows[mine]",
        "overwrites",
        here=True,
    ),
    "another row's activations": Fault(
        "experts_wgmma", FEW, "(u16)(thread / given.top)", "(u16)(thread % given.top)", WRONG, here=True
    ),
    "rows in another order than their pairs": Fault(
        "experts_wgmma",
        WGMMA,
        "Layout::SLAB_BYTES + lane * 128",
        "Layout::SLAB_BYTES + (7 - lane) * 128",
        WRONG,
        here=True,
    ),
    "bytes of rows that never come": Fault(
        "experts_wgmma", WGMMA, "Layout::SLABS * 128 * (TILE_M - rows)", "0", "wait", here=True
    ),
}


def _direct(*, shared: bool) -> ExpertsDecision:
    tile = StreamConfig(1, 2, 1, 8, True, 1, 3, 1, digits=not shared)
    configs = [DirectConfig(tile, gated, SHAPE.top, 4 if shared else 0) for gated in (True, False)]
    return DirectDecision(configs[0], configs[1], "a test's")


def report(builder: Builder, planted: tuple[str, Path] | None, function: str, *, here: bool = False) -> str:
    """What the emulation says of a layer with a pair that is elsewhere, and experts with several tiles."""
    torch.manual_seed(0)
    layer = random_layer(SHAPE)
    direct = function in ("experts_stream", "experts_shared")
    x, ids, weights = random_routing(SHAPE, 3 if direct else 40)
    ids[1, 0] = 9
    if function == "experts_shared":
        ids[2, 1] = ids[2, 0]
    chosen = (
        _direct(shared=function == "experts_shared")
        if direct
        else decision(shape_of(x, ids, layer.weights), *((8, 4) if here else (16,)), here=here)
    )
    try:
        routed = run_layer(builder, chosen, x, ids, weights, layer.weights, planted=planted)
    except KernelFault as fault:
        return str(fault)
    # NaN compares false with everything.
    right = relative_error(routed.out, layer.reference(x, ids, weights)) < 2 * BOUND[SHAPE.dtype]
    return "nothing" if right else WRONG


def test_every_fault_has_a_place_in_the_sources() -> None:
    for fault in FAULTS.values():
        assert (SOURCES / fault.file).read_text(encoding="utf-8").count(fault.old) == 1


# Every time: in each source one that makes the result wrong and one that does something worse.
@pytest.mark.parametrize(
    "name", first_of_each(list(FAULTS), lambda name: (FAULTS[name].file, FAULTS[name].reported == WRONG))
)
def test_a_planted_fault_is_reported(builder: Builder, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    sources = tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    text = (sources / fault.file).read_text(encoding="utf-8")
    (sources / fault.file).write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    found = report(builder, (fault.function, sources), fault.function, here=fault.here)
    assert re.search(fault.reported, found, re.DOTALL), found


@pytest.mark.parametrize(
    ("function", "here"),
    [("experts_wgmma", False), ("experts_wgmma", True), ("experts_stream", False), ("experts_shared", False)],
)
def test_without_a_fault_there_is_nothing_to_report(builder: Builder, function: str, here: bool) -> None:
    assert report(builder, None, function, here=here) == "nothing"
