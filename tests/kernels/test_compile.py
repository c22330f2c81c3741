"""Every kernel compiles for every architecture without spilling registers; NVRTC needs no GPU for that."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from marlinq.errors import EnvironmentProblem
from marlinq.kernels import ARCHITECTURES, Device, Problem, compile_kernel, decide, forced_kernel
from marlinq.kernels.decision import available

# On the two architectures that the project measures or falls back to, everything; elsewhere the extremes.
FULL = ("sm_80", "sm_90a")
BATCHES = {"stream": (1, 9, 17, 33), "bulk": (1, 9), "warpgroup": (8, 32, 64, 128)}


def variants(architecture: str) -> list[tuple[str, dict[str, object]]]:
    """Sources and definitions that decisions reach on ``architecture``, for one layer shape."""
    large = architecture in ("sm_90a", "sm_100a", "sm_103a")
    device = Device(architecture, 132, 232_448 if large else 101_376)
    groups = (32, 64, 128, -1) if architecture in FULL else (32, -1)
    found = {}
    for kernel in available(device):
        batches = BATCHES[kernel]
        for m, group, zeros, bfloat16 in itertools.product(batches, groups, (False, True), (False, True)):
            problem = Problem(m, 4096, 4096, group, zeros, bfloat16)
            with forced_kernel(kernel):
                config = decide(problem, device).config
            assert config is not None
            defines = config.defines(problem)
            found[config.source, tuple(sorted(defines.items()))] = (config.source, defines)
    return list(found.values())


def trouble(job: tuple[str, str, dict[str, object]]) -> str | None:
    """What is wrong with a variant, or None: spills, or warpgroup products that were serialised."""
    architecture, source, defines = job
    compiled = compile_kernel(source, architecture, defines)
    if compiled.spill_bytes or "C75" in compiled.log:
        return f"{architecture} {source} {defines}: {compiled.spill_bytes} bytes spilled; {compiled.log}"
    return None


@pytest.mark.slow
def test_no_variant_spills_on_any_architecture() -> None:
    jobs = [(architecture, *variant) for architecture in ARCHITECTURES for variant in variants(architecture)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [found for found in pool.map(trouble, jobs) if found]
    assert not wrong


def test_a_broken_variant_is_reported_with_the_compilers_words() -> None:
    with pytest.raises(EnvironmentProblem, match=r"does not compile for sm_90a with NVRTC .*error"):
        compile_kernel("w4a16_stream.cu", "sm_90a", {"ELEMENT": "Half"})
