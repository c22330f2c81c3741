"""Faults planted into the kernels of experts: the emulation, or the result, has to tell every one of them."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch

from emulation.build import Builder
from emulation.faults import Planted, sites
from emulation.launching import KernelFault
from marlinq.kernels.experts.configurations import DirectConfig, DirectDecision, ExpertsDecision
from marlinq.kernels.experts.steps import shape_of
from marlinq.kernels.variants.stream import StreamConfig
from tests.emulation.experts import run_layer
from tests.emulation.gemm import SOURCES
from tests.emulation.test_experts import decision
from tests.kernels.experts_problems import Shape, random_layer, random_routing
from tests.kernels.problems import BOUND, relative_error
from tests.testing.pairs import first_of_each

WRONG = "the result is wrong"
EARLY = "without waiting for the previous kernel"
SHAPE = Shape(4, 2, 192, 128, 64)


class Fault(NamedTuple):
    """A fault and the report that it has to cause.

    Attributes:
        function: the kernel in which it is planted.
        planted: the fault site and its wrong text.
        reported: a regular expression of the report.
        local_sort: True for a layer whose blocks sort pairs themselves.
    """

    function: str
    planted: Planted
    reported: str
    local_sort: bool = False


UNORDERED = "without waiting for it|may still be reading"
FAULTS = {
    "ids too early": Fault("experts_route", Planted("route_waits"), EARLY),
    "counts before zeros": Fault(
        "experts_route", Planted("route_counters_cleared"), "without waiting for it"
    ),
    "equal pairs at one place": Fault(
        "experts_route",
        Planted("route_place", "first_rows[expert] + of_warps[warp * EXPERTS + expert]"),
        "second time",
    ),
    "records too early": Fault("experts_wgmma", Planted("records_wait"), EARLY),
    "activations too early": Fault("experts_wgmma", Planted("expert_rows_wait"), EARLY),
    "another expert's words": Fault("experts_wgmma", Planted("expert_plane", "0"), WRONG),
    "rows of the next expert": Fault(
        "experts_wgmma", Planted("expert_rows", "TileM"), "second time|out of bounds"
    ),
    "sums too early": Fault("experts_sum", Planted("expert_sum_waits"), EARLY),
    "rows of pairs that are elsewhere": Fault("experts_sum", Planted("pair_elsewhere"), "out of bounds"),
    "a choice too early": Fault("experts_stream", Planted("choice_waits"), EARLY),
    "another slot's activations": Fault("experts_stream", Planted("slot_activations"), WRONG),
    "rows past the batch of a row alone": Fault(
        "experts_stream", Planted("inner_columns", "8"), "second time|out of bounds"
    ),
    "no routing weight": Fault(
        "experts_stream", Planted("routing_weight", "gated<C::ACTIVATION>(gate.x, up.x)"), WRONG
    ),
    "a shared choice too early": Fault("experts_shared", Planted("shared_choice_waits"), EARLY),
    "activations of shared experts too early": Fault(
        "experts_shared", Planted("shared_activations_wait"), EARLY
    ),
    "groups before their pairs are compared": Fault("experts_shared", Planted("pairs_compared"), UNORDERED),
    "an expert twice in one column": Fault(
        "experts_shared", Planted("expert_again", "expert"), WRONG + "|second time|without"
    ),
    "a segment's weights for the next": Fault(
        "experts_shared", Planted("next_segment", "++weights_chunk;"), WRONG + "|out of bounds"
    ),
    "a row's pairs in other rows' columns": Fault("experts_shared", Planted("empty_column", "0"), WRONG),
    "ids too early for blocks that sort": Fault(
        "experts_wgmma", Planted("pairs_wait"), EARLY, local_sort=True
    ),
    "experts compared before all are there": Fault(
        "experts_wgmma", Planted("ids_there"), UNORDERED, local_sort=True
    ),
    "equal pairs at the first one's place": Fault(
        "experts_wgmma", Planted("few_pairs_place", "first_rows[mine]"), "overwrites", local_sort=True
    ),
    "another row's activations": Fault(
        "experts_wgmma", Planted("few_pairs_row", "thread % given.top"), WRONG, local_sort=True
    ),
    "rows in another order than their pairs": Fault(
        "experts_wgmma", Planted("gathered_row", "(7 - lane) * 128"), WRONG, local_sort=True
    ),
    "bytes of rows that never come": Fault(
        "experts_wgmma", Planted("gathered_bytes", "0"), "wait", local_sort=True
    ),
}


def _direct(*, shared: bool) -> ExpertsDecision:
    tile = StreamConfig(1, 2, 1, 8, True, 1, 3, 1, digits=not shared)
    configs = [DirectConfig(tile, gated, SHAPE.top, 4 if shared else 0) for gated in (True, False)]
    return DirectDecision(configs[0], configs[1], "a test's")


def report(
    builder: Builder, planted: tuple[str, Planted] | None, function: str, *, local_sort: bool = False
) -> str:
    """The emulation's message for a layer with a pair that is elsewhere, and experts with several tiles."""
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
        else decision(
            shape_of(x, ids, layer.weights), *((8, 4) if local_sort else (16,)), local_sort=local_sort
        )
    )
    try:
        routed = run_layer(builder, chosen, x, ids, weights, layer.weights, planted=planted)
    except KernelFault as fault:
        return str(fault)
    # NaN compares false with everything.
    right = relative_error(routed.out, layer.reference(x, ids, weights)) < 2 * BOUND[SHAPE.dtype]
    return "nothing" if right else WRONG


SITES = sites(SOURCES)


# Every time: in each source one that makes the result wrong and one that does something worse.
@pytest.mark.parametrize(
    "name",
    first_of_each(
        list(FAULTS), lambda name: (SITES[FAULTS[name].planted.site], FAULTS[name].reported == WRONG)
    ),
)
def test_a_planted_fault_is_reported(builder: Builder, name: str) -> None:
    fault = FAULTS[name]
    found = report(builder, (fault.function, fault.planted), fault.function, local_sort=fault.local_sort)
    assert re.search(fault.reported, found, re.DOTALL), found


@pytest.mark.parametrize(
    ("function", "local_sort"),
    [("experts_wgmma", False), ("experts_wgmma", True), ("experts_stream", False), ("experts_shared", False)],
)
def test_without_a_fault_there_is_nothing_to_report(
    builder: Builder, function: str, local_sort: bool
) -> None:
    assert report(builder, None, function, local_sort=local_sort) == "nothing"
