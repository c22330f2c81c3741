"""The warpgroup kernel with FP8 activations: what it takes, its configurations, its compilation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.weight_formats import INT8
from marlinq.kernels.driver.compiler import compile_kernel
from marlinq.kernels.variants.warpgroup_fp8 import configuration, refusal
from tests.kernels.problems import int4_problem

WANTED = int4_problem(1024, 6144, 4096, 128, zeros=False, bfloat16=True)


@pytest.mark.parametrize(
    ("problem", "device", "reason"),
    [
        (WANTED, H200, None),
        (WANTED, replace(H200, architecture="sm_80"), "compute capability 9.0, found sm_80"),
        (WANTED, replace(H200, architecture="sm_100a"), "compute capability 9.0, found sm_100a"),
        (replace(WANTED, format=INT8), H200, "found int8"),
        (replace(WANTED, zeros=True), H200, "found stored zero points"),
        (replace(WANTED, granularity=Granularity.group(64)), H200, "take groups of 128, found"),
        (replace(WANTED, granularity=Granularity.channel()), H200, "take groups of 128, found"),
    ],
)
def test_other_weights_and_gpus_are_refused(problem, device, reason) -> None:  # type: ignore[no-untyped-def]
    found = refusal(problem, device)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize("m", [1, 128, 1000, 1024, 4096])
@pytest.mark.parametrize("n", [4096, 6144, 28672])
def test_configurations_fit(m: int, n: int) -> None:
    problem = replace(WANTED, m=m, n=n)
    config = configuration(problem, H200, chunk_scales=True)
    assert config.stages >= 3
    assert config.shared_bytes(problem) <= H200.shared_bytes - 1024
    assert config.grid(problem) <= H200.multiprocessors
    # Tiles are whole where they nearly fill the waves.
    tiles, waves = config.tiles(problem), -(-config.tiles(problem) // H200.multiprocessors)
    whole = tiles * config.chunks(problem) % config.grid(problem) == 0
    assert whole or tiles < 0.9 * waves * H200.multiprocessors


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("chunk_scales", [False, True])
def test_they_compile_without_spills(bfloat16: bool, chunk_scales: bool) -> None:
    problem = replace(WANTED, bfloat16=bfloat16)
    config = configuration(problem, H200, chunk_scales=chunk_scales)
    compiled = compile_kernel(config.instantiation(problem), "sm_90a")
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
    assert "C75" not in compiled.log
