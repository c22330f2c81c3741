"""Kernels of GPUs before compute capability 9.0: as PTX, which a newer GPU's driver assembles for itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from marlinq.kernels import Device, Problem, decide
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.driver.compiler import compile_to_ptx, nvrtc_version
from marlinq.kernels.driver.cuda_driver import Launches, load_function, on_device
from tests.kernels.problems import BOUND, int4_problem, random_operands, relative_error

A100 = Device("sm_80", multiprocessors=108, shared_bytes=166_912)
DTYPES = (torch.float16, torch.bfloat16)
BATCHES = (1, 9, 17, 200)
# Every group size, with and without zero points, in both types.
WEIGHTS = ((32, True, 0), (64, False, 1), (128, True, 1), (128, False, 0), (-1, True, 0), (-1, False, 1))


def decided(problem: Problem) -> Configuration:
    """The variant that an A100 runs."""
    config = decide(problem, A100).config
    assert config is not None
    return config


def ptx_of(problem: Problem) -> bytes:
    """Its PTX."""
    config = decided(problem)
    return compile_to_ptx(config.instantiation(problem), "compute_80")


def test_nothing_newer_than_ampere_is_used() -> None:
    text = ptx_of(int4_problem(9, 4096, 4096, 64, zeros=True, bfloat16=True)).decode()
    assert ".target sm_80\n" in text
    assert "mma.sync" in text
    assert not re.search(r"cluster|griddepcontrol|mapa|mbarrier|wgmma", text)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("m", BATCHES)
@pytest.mark.parametrize(("group", "zeros", "kind"), WEIGHTS)
def test_ampere_variants_on_this_gpu(tmp_path: Path, m: int, group: int, zeros: bool, kind: int) -> None:
    import cupy

    known = cupy.cuda.runtime.driverGetVersion()
    major, minor = (int(part) for part in nvrtc_version().split("."))
    if 1000 * major + 10 * minor > known:
        pytest.skip(
            f"the driver ({known // 1000}.{known % 1000 // 10}) takes no PTX of NVRTC {nvrtc_version()}"
        )
    k, n = 1152, 2112
    problem = int4_problem(m, n, k, group, zeros, bfloat16=DTYPES[kind] == torch.bfloat16)
    config, shared = decided(problem), decided(problem).shared_bytes(problem)
    path = tmp_path / "ampere.ptx"
    path.write_bytes(ptx_of(problem))
    function = load_function(path, config.function, 0, shared)

    operands = random_operands(k, n, group, DTYPES[kind], zeros=zeros, bias=True)
    x = torch.randn(m, k, device="cuda").to(DTYPES[kind])
    out = torch.full((m, n), torch.nan, dtype=DTYPES[kind], device="cuda")
    given = ProductTensors(x, operands.operand, operands.bias, out)
    arguments = config.arguments(given, dependent=False)
    with on_device(0):
        Launches(function, config.grid(problem), config.threads, shared, arguments).take().start()
    assert relative_error(out, operands.reference(x)) < BOUND[DTYPES[kind]]
