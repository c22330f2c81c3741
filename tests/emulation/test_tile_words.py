"""The kernel that reorders words: on the emulation, bit for bit what the layouts' own arithmetic gives."""

from __future__ import annotations

import pytest
import torch

from emulation.build import Builder
from emulation.launching import EmulatedKernel, Memory, apart
from marlinq.formats import ModuleSpec, transcode
from marlinq.kernels.driver.compiler import compile_kernel
from marlinq.kernels.launch import tile_words
from tests.emulation.gemm import SOURCES
from tests.testing.architectures import QUICK_FIRST
from tests.testing.layouts import INTEGERS
from tests.testing.schemes import scheme


@pytest.mark.parametrize("layout", [layout for layout in INTEGERS if layout != "marlin"])
@pytest.mark.parametrize(("k", "n"), [(16, 64), (64, 192), (208, 128)])
def test_words_are_those_of_the_layouts(builder: Builder, layout: str, k: int, n: int) -> None:
    source, target = INTEGERS[layout], INTEGERS["marlin"]
    spec = ModuleSpec(k, n, scheme(-1))
    generator = torch.Generator().manual_seed(k)
    shape = source.expected(spec)[source.key].shape
    drawn = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator)
    words = apart(drawn.to(torch.int32))
    tiles = apart(torch.zeros(k // 16, 2 * n, dtype=torch.int32))
    text = tile_words.instantiation(source.family).text()
    kernel = EmulatedKernel(builder.kernel(text, "tile_words", SOURCES))
    arguments = tile_words.Arguments(words.data_ptr(), tiles.data_ptr(), k, n)
    memory = [Memory("words", words), Memory("tiles", tiles, writable=True)]
    kernel.launch(k // 16 * (n // 64), tile_words.THREADS, 0, arguments, memory)
    assert torch.equal(tiles, transcode(words, spec, source, target))


def test_every_family_but_the_kernels_own_has_a_kernel() -> None:
    families = {layout.family for layout in INTEGERS.values()}
    assert families - {"marlin"} == set(tile_words.SOURCES)


@pytest.mark.parametrize("architecture", QUICK_FIRST)
@pytest.mark.parametrize("family", tile_words.SOURCES)
def test_it_compiles_without_spills(family: str, architecture: str) -> None:
    compiled = compile_kernel(tile_words.instantiation(family), architecture)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


def test_unsupported_words_are_refused() -> None:
    for shape, k, n in (((2, 64), 16, 32), ((2, 64), 32, 64), ((3, 64), 24, 64)):
        with pytest.raises(ValueError, match="words: expected"):
            tile_words.tile_words(torch.zeros(shape, dtype=torch.int32), "gptq", k, n)
    with pytest.raises(ValueError, match="in one piece"):
        tile_words.tile_words(torch.zeros(64, 2, dtype=torch.int32).t(), "gptq", 16, 64)
