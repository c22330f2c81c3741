"""Weights of other elements than 4-bit integers through every kernel on the emulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault
from marlinq.core.granularity import Granularity
from marlinq.kernels import Problem
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.weight_formats import INT4_SPARSE, WEIGHT_FORMATS
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.emulation.gemm import Case, bound, run

CONFIGS: dict[str, Configuration] = {
    "stream, a row": StreamConfig(2, 2, 1, 8, True, 2, 3, 1),
    "stream, scaled weights": StreamConfig(1, 4, 2, 8, False, 1, 3, 1),
    "stream, short chunks": StreamConfig(2, 2, 1, 4, False, 2, 3, 1),
    "bulk": BulkConfig(2, 2, 2, 4, 2, 6, 1),
    "warpgroup, a word": WarpgroupConfig(16, 1, 1, 2, 8, 1, 4, 1, 132),
    "warpgroup, two words": WarpgroupConfig(32, 2, 1, 1, 8, 2, 4, 1, 132),
    "warpgroup, short chunks": WarpgroupConfig(16, 1, 1, 2, 4, 1, 6, 1, 132),
    "warpgroup, four words": WarpgroupConfig(32, 4, 1, 1, 8, 1, 4, 1, 132),
}
ROWS = {"stream, a row": 3, "stream, short chunks": 5, "stream, scaled weights": 11, "bulk": 13}
# Group size, zero points, bfloat16: every way of scaling with every element.
FEATURES = {
    "int8": ((128, False, False), (64, True, True), (-1, True, False), (32, False, True)),
    "fp8_e4m3": ((128, False, False), (64, False, True), (-1, False, True)),
    "int4-2:4": ((128, False, False), (64, False, True), (-1, False, True), (32, False, False)),
    "fp4_e2m1": ((32, False, False), (16, False, True), (16, False, False), (-1, False, True)),
}


def right(builder: Builder, case: Case) -> None:
    error = run(builder, case)
    assert error < bound(case.problem), f"{case.problem} {case.config}: {error}"


# Every time: each kernel with each element; its variants, and ways of scaling, in turn. A variant is the
# kernel's for all elements, a decoder the element's for all variants.
VARIANTS = {
    kernel: [config for config in CONFIGS if config.startswith(kernel)]
    for kernel in ("stream", "bulk", "warpgroup")
}
IN_TURN = {
    (element, variants[number % len(variants)]): (number + place) % len(FEATURES[element])
    for number, element in enumerate(FEATURES)
    for place, variants in enumerate(VARIANTS.values())
}
CASES = [
    pytest.param(
        element, config, seed, marks=[] if IN_TURN.get((element, config)) == seed else pytest.mark.slow
    )
    for element, ways in FEATURES.items()
    for config in CONFIGS
    for seed in range(len(ways))
]


@pytest.mark.parametrize(("element", "config", "seed"), CASES)
def test_every_kernel_multiplies(builder: Builder, element: str, config: str, seed: int) -> None:
    group, zeros, bfloat16 = FEATURES[element][seed]
    problem = Problem(
        ROWS.get(config, 29),
        320,
        512,
        Granularity.from_group_size(group),
        zeros,
        bfloat16,
        WEIGHT_FORMATS[element],
    )
    found = CONFIGS[config]
    if isinstance(found, StreamConfig) and group == 16:
        found = replace(found, scale_sums=False)
    right(builder, Case(problem, found, bias=seed % 2 == 0, x_padding=8, seed=seed))


FAULTS = {
    "another base of zero points": (Planted("int8_zero_base", "0x40004000u"), "int8", 128, True, False),
    "even bytes twice": (Planted("int8_odd_bytes", "words[h]"), "int8", 128, False, False),
    "the highest bit not inverted": (
        Planted("int8_highest_bit", "(bytes & 0x00800080u)"),
        "int8",
        128,
        False,
        True,
    ),
    "no sign": (Planted("e4m3_sign", "0"), "fp8_e4m3", 128, False, False),
    "a bit of mantissa lost": (Planted("e4m3_mantissa", "0x3f003f00u"), "fp8_e4m3", 128, False, False),
    "no sign of FP4": (Planted("e2m1_sign", "0"), "fp4_e2m1", 32, False, False),
    "halves of FP4 exchanged": (Planted("e2m1_place", "0x4051u"), "fp4_e2m1", 32, False, False),
    "the lower magnitudes twice": (Planted("e2m1_upper", "nibbles"), "fp4_e2m1", 128, False, True),
    "one row's scales for two": (Planted("stream_row_scales", "0"), "fp4_e2m1", 16, False, False),
    "another bias": (Planted("e4m3_bias", "0x7b007b00u"), "fp8_e4m3", 128, False, True),
}
"""The fault, and the element, group size, zero points and bfloat16 that show it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_decoder_is_noticed(builder: Builder, fault: str) -> None:
    planted, element, group, zeros, bfloat16 = FAULTS[fault]
    problem = Problem(3, 128, 256, Granularity.group(group), zeros, bfloat16, WEIGHT_FORMATS[element])
    case = Case(problem, StreamConfig(2, 2, 1, 8, group > 16, 1, 3, 1))
    assert not run(builder, case, planted) < bound(problem)


_IN_FLIGHT = Planted("row_of_places", "(i + 1) % PLACE_ROWS")
SPARSE_FAULTS = {
    "one word of places for all blocks": (Planted("places_of_block", "words.places.of[0]"), "stream, a row"),
    "half of the places not copied": (Planted("stream_place_lanes", "8"), "stream, a row"),
    "places of even blocks for odd ones": (Planted("sparse_selector", "0"), "bulk"),
    "places of a neighbour for a lone block": (Planted("places_of_lone_block", "0"), "warpgroup, a word"),
    "places of even products for odd ones": (Planted("warpgroup_selector", "0"), "warpgroup, two words"),
    "places overwritten in flight": (_IN_FLIGHT, "warpgroup, two words"),
    "places of two rows overwritten in flight": (_IN_FLIGHT, "warpgroup, short chunks"),
}
"""The fault, and the configuration that shows it."""


@pytest.mark.parametrize("fault", SPARSE_FAULTS)
def test_wrong_places_are_noticed(builder: Builder, fault: str) -> None:
    planted, config = SPARSE_FAULTS[fault]
    problem = Problem(3, 128, 256, Granularity.group(128), False, False, INT4_SPARSE)
    try:
        error = run(builder, Case(problem, CONFIGS[config]), planted)
    except KernelFault:
        return
    assert not error < bound(problem)
