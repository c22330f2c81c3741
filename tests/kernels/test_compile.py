"""Every kernel compiles for every architecture without spilling registers; NVRTC needs no GPU for that."""

from __future__ import annotations

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from lab.kernels.resources import DEVICES, Measured, Variant, compile_all, page, trouble, variants
from marlinq.core.errors import EnvironmentProblem
from marlinq.kernels import (
    ARCHITECTURES,
    GROUP_SIZES,
    Device,
    Problem,
    compile_kernel,
    decide,
    dependent_launches,
    forced_kernel,
)
from marlinq.kernels.choose.decision import available
from marlinq.kernels.contract import device as known
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.device import registers_of_a_thread
from marlinq.kernels.contract.instantiation import CUDA_SOURCES, Instantiation, unit
from marlinq.kernels.contract.weight_formats import INT4, WEIGHT_FORMATS
from marlinq.kernels.driver.compiler import compile_text
from marlinq.kernels.variants import KERNELS
from marlinq.kernels.variants.stream import StreamConfig
from tests.kernels.problems import even_splits, int4_problem
from tests.kernels.test_arguments import section
from tests.testing.architectures import MAIN_FIRST, QUICK

H200 = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)


def sample(architecture: str) -> list[Variant]:
    """The variant of each kernel with most rows, smallest groups and zero points: it needs most registers."""
    return list({variant.kernel: variant for variant in sorted(variants(architecture), key=_size)}.values())


def _size(variant: Variant) -> tuple[int, bool, bool, int]:
    problem = variant.problem
    return max(variant.batches), problem.zeros, problem.bfloat16, -problem.granularity.group_size


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    """The variants of a sample, compiled once for all tests."""
    return compile_all(variant for architecture in QUICK for variant in sample(architecture))


def rows_of(text: str) -> set[tuple[str, ...]]:
    """Section, architecture and the other cells of every row of a page."""
    found: set[tuple[str, ...]] = set()
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line
        if line.startswith("| sm_"):
            architectures, *cells = line.strip("| ").split(" | ")
            found |= {(section, architecture, *cells) for architecture in architectures.split()}
    return found


def stream_variant() -> Variant:
    """One of the stream kernel with tiles of several rows."""
    return next(
        variant
        for variant in variants("sm_90a")
        if isinstance(variant.config, StreamConfig) and not variant.config.digits
    )


def test_no_variant_of_a_sample_spills(measured: list[Measured]) -> None:
    wrong = [found for variant, compiled in measured if (found := trouble(variant, compiled))]
    assert not wrong


def test_sources_ask_for_no_other_compute_capability() -> None:
    """Else the few architectures that are compiled every time would leave a branch out."""
    texts = [path.read_text() for path in CUDA_SOURCES.rglob("*.cuh")]
    asked = {condition for text in texts for condition in re.findall(r"__CUDA_ARCH__\b[\s<>=!]*\d*", text)}
    assert asked == {"__CUDA_ARCH__ >= 900", "__CUDA_ARCH__ == 900"}


@pytest.mark.parametrize("architecture", MAIN_FIRST)
def test_no_variant_with_an_activation_spills(architecture: str) -> None:
    device = DEVICES[architecture]
    batches = (1, 16, 64) if device.has_warpgroups else (4, 64)
    features = ((128, False, False), (32, True, True)) if device.has_warpgroups else ((128, False, False),)
    chosen = {}
    for m, (group, zeros, bfloat16) in zip(batches, itertools.cycle(features)):
        problem = int4_problem(m, 28672, 4096, group, zeros, bfloat16, activation="gelu_tanh")
        config = decide(problem, device).config
        if config is not None:
            variant = Variant(architecture, "stream", problem, config, (m,))
            chosen[config.instantiation(problem)] = variant
    assert chosen
    wrong = [
        found for variant, compiled in compile_all(chosen.values()) if (found := trouble(variant, compiled))
    ]
    assert not wrong


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", MAIN_FIRST)
def test_no_variant_of_another_element_spills(architecture: str, whole: bool) -> None:
    """Every format and every kernel; all pairs of them where it is slow."""
    device = DEVICES[architecture]
    formats = [each for each in WEIGHT_FORMATS.values() if each.codec is not None and each != INT4]
    kernels = available(device)
    pairs = list(itertools.product(formats, kernels))
    if not whole:
        pairs = [(each, kernels[number % len(kernels)]) for number, each in enumerate(formats)]
    chosen = {}
    for weight_format, kernel in pairs:
        groups = [size for size in (16, 32, 128, -1) if size < 0 or size >= weight_format.smallest_group]
        batches = {"stream": (4, 16, 64), "bulk": (8, 16), "warpgroup": (16, 64, 144, 512)}[kernel]
        for turn, (m, group) in enumerate(itertools.product(batches, groups)):
            zeros, bfloat16 = weight_format.stores_zeros and turn % 3 == 0, turn % 2 == 0
            problem = int4_problem(m, 4096, 4096, group, zeros, bfloat16, weight_format)
            with forced_kernel(kernel):
                config = decide(problem, device).config
            if config is not None:
                variant = Variant(architecture, kernel, problem, config, (m,))
                chosen[config.instantiation(problem)] = variant
    # Every pair has several batches and groups; the last has most rows.
    last = {(variant.problem.format, variant.kernel): variant for variant in chosen.values()}
    listed = (chosen if whole else last).values()
    wrong = [found for variant, compiled in compile_all(listed) if (found := trouble(variant, compiled))]
    assert not wrong


def work_on_rows(config: Configuration, problem: Problem) -> list[Instantiation]:
    """A norm before the product, the residual stream behind it: what the variant can do of it."""
    found = [config.row_variant(problem, normed=normed, adds=not normed) for normed in (False, True)]
    assert any(found)
    return [one.instantiation for one in found if one is not None]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MAIN_FIRST)
def test_no_variant_with_work_on_rows_spills(architecture: str) -> None:
    device = DEVICES[architecture]
    features = ((128, False, False), (32, True, True)) if device.has_warpgroups else ((32, True, False),)
    chosen: dict[Instantiation, None] = {}
    for m, (group, zeros, bfloat16) in zip((1, 8), itertools.cycle(features)):
        problem = int4_problem(m, 4096, 4096, group, zeros, bfloat16)
        with forced_kernel("stream"):
            config = decide(problem, device).config
        assert isinstance(config, StreamConfig)
        assert config.blocks_m == 1
        chosen |= dict.fromkeys(work_on_rows(config, problem))
    wide: list[tuple[str, int, str | None]] = [
        ("warpgroup", 4096, None),
        ("warpgroup", 28672, "gelu_tanh"),
        ("bulk", 4096, None),
    ]
    for (kernel, n, activation), (group, zeros, bfloat16) in zip(wide, itertools.cycle(reversed(features))):
        if not device.has_warpgroups:
            continue
        problem = int4_problem(16, n, 4096, group, zeros, bfloat16, activation=activation)
        with forced_kernel(kernel), dependent_launches():
            config = decide(problem, known.H200).config
        assert config is not None
        chosen |= dict.fromkeys(work_on_rows(config, problem))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda instantiation: compile_kernel(instantiation, architecture), chosen)
    assert [found.spill_bytes for found in compiled] == [0] * len(chosen)


@pytest.mark.slow
def test_no_variant_that_deals_tiles_out_spills() -> None:
    chosen = {}
    sizes = [(m, 4096) for m in (40, 64, 80, 128, 144, 176)] + [(176, 28672)]
    for (m, n), group, zeros, bfloat16 in itertools.product(sizes, GROUP_SIZES, (False, True), (False, True)):
        problem = int4_problem(m, n, 4096, group, zeros, bfloat16)
        for config in even_splits(problem, H200)[:2]:
            variant = Variant(H200.architecture, "warpgroup", problem, config, (m,))
            chosen[config.instantiation(problem)] = variant
    wrong = [
        found for variant, compiled in compile_all(chosen.values()) if (found := trouble(variant, compiled))
    ]
    assert not wrong


def test_every_kernel_is_in_the_sample_of_every_architecture() -> None:
    for architecture in QUICK:
        kernels = {variant.kernel for variant in sample(architecture)}
        assert kernels == {variant.kernel for variant in variants(architecture)}


def test_the_table_of_resources_shows_every_variant_and_its_registers(measured: list[Measured]) -> None:
    found = rows_of(page(measured))
    for variant, compiled in measured:
        zeros = "yes" if variant.problem.zeros else "no"
        start = (f"## {variant.kernel}", variant.architecture, *variant.parameters.values(), zeros)
        rows = [row[len(start) :] for row in found if row[: len(start)] == start]
        assert rows, start
        assert str(compiled.spill_bytes) in {row[-1] for row in rows}


@pytest.mark.slow
def test_no_variant_at_all_spills() -> None:
    compiled = compile_all(variant for architecture in ARCHITECTURES for variant in variants(architecture))
    assert not [found for variant, one in compiled if (found := trouble(variant, one))]


def test_spills_arrays_in_memory_and_serialised_products_are_found() -> None:
    variant = stream_variant()
    compiled = variant.compile()
    assert trouble(variant, compiled) is None
    # Eight blocks leave a quarter of the registers that the accumulators of the largest tile take.
    crowded = replace(variant, config=replace(variant.config, blocks_m=8, rows=4, min_blocks=8))
    assert "bytes spilled" in (trouble(crowded, crowded.compile()) or "")
    indexed = replace(compiled, stack_bytes=64)
    assert "64 of stack" in (trouble(variant, indexed) or "")
    serialised = replace(compiled, log="wgmma.mma_async instructions are serialized (C7510) in 'w4a16_wgmma'")
    assert "C7510" in (trouble(variant, serialised) or "")


@pytest.mark.parametrize(("warps_n", "warps_k", "blocks", "registers"), [(3, 3, 1, 168), (7, 1, 3, 80)])
def test_the_assembler_gives_as_many_registers_as_we_count(
    warps_n: int, warps_k: int, blocks: int, registers: int
) -> None:
    assert registers_of_a_thread(warps_n * warps_k, blocks) == registers
    variant = stream_variant()
    # The largest tile takes all it can get.
    config = replace(variant.config, warps_n=warps_n, warps_k=warps_k, blocks_m=8, rows=4, min_blocks=blocks)
    assert replace(variant, config=config).compile().registers == registers


def test_a_broken_variant_is_reported_with_the_compilers_words() -> None:
    with pytest.raises(EnvironmentProblem, match=r"does not compile for sm_90a with NVRTC .*error"):
        compile_kernel(Instantiation("kernels/gather.cuh", "gather", ()), "sm_90a")


def test_kernels_and_configurations_share_a_translation_unit() -> None:
    def instantiation(kernel: str, group_size: int, zeros: bool, bfloat16: bool) -> Instantiation:
        problem = int4_problem(16, 4096, 4096, group_size, zeros, bfloat16)
        with forced_kernel(kernel):
            config = decide(problem, H200).config
        assert config is not None
        return config.instantiation(problem)

    entries = tuple(
        (f"{kernel}_{number}", instantiation(kernel, *values))
        for kernel in KERNELS
        for number, values in enumerate(((128, False, False), (32, True, True)))
        # Two of one kernel, and one of each other.
        if number == 0 or kernel == "stream"
    )
    together = compile_text(unit(entries), "together", "sm_90a")
    for name, alone in entries:
        code = section(together.cubin, f".text.{name}")
        assert code == section(compile_kernel(alone, "sm_90a").cubin, f".text.{alone.function}"), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_host_and_kernel_count_the_same_shared_memory(kernel: str) -> None:
    variant = next(variant for variant in variants("sm_90a") if variant.kernel == kernel)
    right = variant.config.instantiation(variant.problem)
    compile_kernel(right, "sm_90a")
    counted = dict(right.parameters)["SHARED_BYTES"]
    assert isinstance(counted, int)
    wrong = dict(right.parameters) | {"SHARED_BYTES": counted + 16}
    with pytest.raises(EnvironmentProblem, match="host and kernel count different bytes of shared memory"):
        compile_kernel(replace(right, parameters=tuple(wrong.items())), "sm_90a")


def test_every_field_of_a_configuration_reaches_the_text() -> None:
    parameters = (("Codec", "Int4<Half>"), ("ROWS", 8), ("ZEROS", True), ("SCALING", "Scaling::SUMS"))
    assert Instantiation("kernels/stream.cuh", "w4a16_stream", parameters).text() == (
        '#include "kernels/stream.cuh"\n\n'
        "struct Configuration_w4a16_stream {\n"
        "    typedef Int4<Half> Codec;\n"
        "    static constexpr int ROWS = 8;\n"
        "    static constexpr bool ZEROS = true;\n"
        "    static constexpr Scaling SCALING = Scaling::SUMS;\n"
        "};\n"
        "INSTANTIATE_W4A16_STREAM(w4a16_stream, Configuration_w4a16_stream)\n"
    )
