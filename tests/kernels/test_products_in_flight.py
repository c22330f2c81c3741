"""Registers of products in flight: no compiler reads their sums early or takes the registers that they read.

The products of a warpgroup are asynchronous, of which the compiler in front of the assembler knows nothing:
unless the source prevents it, it may copy accumulators between the last product and the wait. The assembler
reports such reads inside a loop, not those on the way out of one.

Of the registers that a product reads, the assembler reserves those of operand A until the wait, but not that
of a sparse operand's places, so the source uses it behind the wait (``keep_in_register``).
"""

from __future__ import annotations

import re

import pytest

from lab.kernels.resources import variants
from marlinq.kernels import Device, Problem
from marlinq.kernels.contract.weight_formats import INT4_SPARSE
from marlinq.kernels.driver.compiler import compile_to_ptx
from marlinq.kernels.variants.warpgroup import candidates
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.kernels.problems import int4_problem

_REGISTER = re.compile(r"%f\d+")


def early_reads(ptx: str) -> list[str]:
    """The instructions that read an accumulator between its product and the wait for all products."""
    in_flight: set[str] = set()
    found = []
    for line in map(str.strip, ptx.splitlines()):
        if "wgmma.mma_async" in line:
            in_flight.update(_REGISTER.findall(line.split("}")[0]))
        elif re.match(r"wgmma\.wait_group\.sync\.aligned 0;", line):
            in_flight.clear()
        elif not line.startswith(("//", ".")):
            _, _, sources = line.partition(",")
            if in_flight.intersection(_REGISTER.findall(sources)):
                found.append(line)
    return found


def test_an_early_read_is_found() -> None:
    product = (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, %rd1, 1;"
    )
    wait = "wgmma.wait_group.sync.aligned 0;"
    read = "mov.b32 \t%r9, %f2;"
    assert early_reads("\n".join((product, "wgmma.wait_group.sync.aligned 1;", read, wait))) == [read]
    assert not early_reads("\n".join((product, wait, read)))
    assert not early_reads("\n".join((product, "mov.f32 \t%f5, %f6;", wait)))


_PLACES = re.compile(r"wgmma\.mma_async\.sp\..*, (%r\d+), [01], [01], 1, 1, 0;")
_KEPT = re.compile(r"@never st\.shared\.u32 \[%r\d+\], (%r\d+);")


def unkept_places(ptx: str) -> list[str]:
    """The sparse products whose register of places is not used behind a wait that follows them."""
    kept_later: set[str] = set()  # read by instructions behind the line, and not yet behind a wait before it
    kept: set[str] = set()
    found = []
    for line in map(str.strip, reversed(ptx.splitlines())):
        if match := _KEPT.search(line):
            kept_later.add(match[1])
        elif line.startswith("wgmma.wait_group"):
            kept |= kept_later
        elif (match := _PLACES.search(line)) and match[1] not in kept:
            found.append(line)
    return found


def test_an_unkept_register_is_found() -> None:
    product = (
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 "
        "{%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, %rd1, %r5, 0, 1, 1, 1, 0;"
    )
    wait = "wgmma.wait_group.sync.aligned 1;"
    keep = "{ .reg .pred never; setp.eq.u32 never, %r6, 0; @never st.shared.u32 [%r6], %r5; }"
    assert not unkept_places("\n".join((product, wait, keep)))
    for wrong in ((product, keep, wait), (keep, product, wait), (product, wait, keep.replace("%r5", "%r7"))):
        assert unkept_places("\n".join(wrong)) == [product]


@pytest.mark.parametrize(("words", "rows", "group"), [(1, 4, -1), (2, 8, 64)])
def test_places_keep_their_registers_until_products_are_done(words: int, rows: int, group: int) -> None:
    problem = int4_problem(32, 4096, 4096, group, False, True, INT4_SPARSE)
    config = WarpgroupConfig(32, words, 1, 2, rows, 1, 6, 1, 132)
    ptx = compile_to_ptx(config.instantiation(problem), "sm_90a").decode()
    assert len(_PLACES.findall(ptx)) >= words * rows // 2
    assert not unkept_places(ptx)


def _sending() -> list[tuple[Problem, WarpgroupConfig]]:
    """Variants that send their sums to other blocks, of every group."""
    device = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)
    found = {}
    for m in (8, 16, 32):
        for group in (32, 64, 128, -1):
            problem = int4_problem(m, 4096, 4096, group, False, False)
            for config in candidates(problem, device):
                if config.pushes and config.cluster == 2:
                    found.setdefault((m, group, config.words, config.scaling(problem)), (problem, config))
    return list(found.values())


@pytest.mark.slow
def test_sums_are_read_behind_the_wait() -> None:
    chosen = [
        (variant.problem, variant.config)
        for variant in variants("sm_90a")
        if isinstance(variant.config, WarpgroupConfig)
    ]
    wrong = {}
    for problem, config in chosen + _sending():
        ptx = compile_to_ptx(config.instantiation(problem), "sm_90a").decode()
        assert "wgmma.wait_group" in ptx
        if reads := early_reads(ptx):
            wrong[problem, config] = reads[0]
    assert not wrong
