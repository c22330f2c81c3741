"""Every kernel compiles for every architecture without spilling registers; NVRTC needs no GPU for that."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from marlinq.errors import EnvironmentProblem
from marlinq.kernels import ARCHITECTURES, Device, Problem, compile_kernel, decide
from marlinq.kernels.launch import SOURCE, defines_of

# On the two architectures that the project measures or falls back to, everything; elsewhere the extremes.
FULL = ("sm_80", "sm_90a")
BATCHES = (1, 9, 17, 33)


def variants(architecture: str) -> list[dict[str, object]]:
    """Definitions of the variants that decisions reach on ``architecture``, one layer shape each way."""
    device = Device(
        architecture, 132, 232_448 if architecture in ("sm_90a", "sm_100a", "sm_103a") else 101_376
    )
    full = architecture in FULL
    groups = (32, 64, 128, -1) if full else (32, -1)
    found = {}
    for m, group, zeros, bfloat16 in itertools.product(BATCHES, groups, (False, True), (False, True)):
        for n, k in ((28672, 4096), (4096, 4096)) if full else ((4096, 4096),):
            problem = Problem(m, n, k, group, zeros, bfloat16)
            defines = defines_of(problem, decide(problem, device))
            found[tuple(sorted(defines.items()))] = defines
    return list(found.values())


def spills(job: tuple[str, dict[str, object]]) -> str | None:
    """What is wrong with one variant, or None."""
    architecture, defines = job
    compiled = compile_kernel(SOURCE, architecture, defines)
    if compiled.spill_bytes:
        return (
            f"{architecture} {defines}: {compiled.spill_bytes} bytes spilled, {compiled.registers} registers"
        )
    return None


def test_no_variant_spills_on_any_architecture() -> None:
    jobs = [(architecture, defines) for architecture in ARCHITECTURES for defines in variants(architecture)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [found for found in pool.map(spills, jobs) if found]
    assert not wrong


def test_a_broken_variant_is_reported_with_the_compilers_words() -> None:
    with pytest.raises(EnvironmentProblem, match=r"does not compile for sm_90a with NVRTC .*error"):
        compile_kernel(SOURCE, "sm_90a", {"ELEMENT": "Half"})
