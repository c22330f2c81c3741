"""The warpgroup kernel with FP8 activations: what it takes, its configurations, its compilation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations
from marlinq.kernels.choose.eight_bit_decision import BESIDE_INT4, decide_eight_bits
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.weight_formats import INT8
from marlinq.kernels.driver.compiler import compile_kernel
from marlinq.kernels.ops.w4a8 import w4a8_gemm
from marlinq.kernels.variants.warpgroup_fp8 import configuration, refusal
from tests.kernels.problems import int4_problem, random_operands, relative_error

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_operator_rounds_activations_to_e4m3(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = random_operands(256, 128, 128, dtype, bias=True, device="cpu")
    x = torch.randn(2, 3, 256).to(dtype)
    given = x, made.words, made.scales, made.bias, 128
    found = w4a8_gemm(*given)
    error = relative_error(found.view(6, 128), made.reference(x.view(6, 256)))
    # E4M3 has three bits behind the first: a rounding of at most 2^-4, 2^-4 / sqrt(3) / 1.44 in the mean.
    assert 2.0**-7 < error < 2.0**-4
    torch.library.opcheck(
        torch.ops.marlinq.w4a8_gemm.default, given, test_utils=("test_schema", "test_faketensor")
    )


def test_operands_that_do_not_fit_are_named() -> None:
    made = random_operands(256, 64, 128, torch.bfloat16, device="cpu")
    x = torch.randn(2, 256).bfloat16()
    with pytest.raises(ValueError, match="x: expected 256 columns"):
        w4a8_gemm(x[:, :128], made.words, made.scales, None, 64)
    with pytest.raises(ValueError, match=r"scales: expected torch.bfloat16 \[2, 64\]"):
        w4a8_gemm(x, made.words, made.scales[:1], None, 64)
    with pytest.raises(ValueError, match=r"bias: expected torch.bfloat16 \[64\]"):
        w4a8_gemm(x, made.words, made.scales, torch.zeros(64), 64)


def test_fp8_activations_are_chosen_only_on_request() -> None:
    found = decide_eight_bits(WANTED, BESIDE_INT4, H200)
    assert found.least_rows is not None
    assert f"from {found.least_rows} rows on" in found.reason
    by_group = Activations(BESIDE_INT4.element, Granularity.group(128), dynamic=True)
    for activations in (None, by_group):
        assert decide_eight_bits(WANTED, activations, H200).least_rows is None
    refused = decide_eight_bits(replace(WANTED, zeros=True), BESIDE_INT4, H200)
    assert refused.least_rows is None
    assert "found stored zero points" in refused.reason
