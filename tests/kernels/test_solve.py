"""The solvers' kernels compile everywhere; on a GPU their results are the plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marlinq.kernels import ARCHITECTURES, compile_kernel
from marlinq.kernels.solve import (
    PANEL_ROWS,
    PanelTensors,
    TunedTensors,
    prepare_gradients,
    prepare_panel,
    prepare_weight,
)
from marlinq.kernels.solve.panel import instantiation, shared_bytes
from marlinq.kernels.solve.trained_weight import instantiation as tuned_instantiation
from marlinq.methods.grid import search_factors
from marlinq.methods.rtn import round_to_nearest
from marlinq.methods.tuning import TunableWeight
from tests.testing.architectures import MAIN_FIRST
from tests.testing.schemes import scheme


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MAIN_FIRST)
def test_no_variant_spills(architecture: str) -> None:
    symmetric = ARCHITECTURES.index(architecture) % 2 == 0
    wanted = scheme(symmetric=symmetric)
    for factors in (0, len(search_factors())):
        one = instantiation(wanted, factors)
        for kernel in (one, replace(one, header="solve/round_panels.cuh", function="round_panels")):
            compiled = compile_kernel(kernel, architecture)
            assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


def test_the_largest_panel_fits_the_smallest_gpu() -> None:
    # 99 KB a block on compute capability 8.6 and 8.9.
    assert shared_bytes(PANEL_ROWS) <= 99 << 10


def test_tensors_that_the_kernel_cannot_read_are_refused() -> None:
    rows, n = 32, 8
    wide, vector = torch.zeros(rows, n), torch.zeros(n)
    codes = torch.zeros(rows, n, dtype=torch.uint8)
    square = torch.zeros(rows, rows)
    good = PanelTensors(wide, None, wide, square, vector, None, vector, vector, codes, wide)
    prepare_panel(good, scheme(), 0.0)
    wrong = (
        good._replace(difference=torch.zeros(n, rows).t()),
        good._replace(feedback=square[:, 1:]),
        good._replace(base=wide),
        good._replace(scales=wide),
    )
    for tensors in wrong:
        with pytest.raises(ValueError, match="expected a contiguous|needs both"):
            prepare_panel(tensors, scheme(), 0.0)
    tall = torch.zeros(PANEL_ROWS + 1, n)
    with pytest.raises(ValueError, match="expected 1 to 128 channels, found 129"):
        prepare_panel(good._replace(updated=tall), scheme(), 0.0)


def tuned(*, latent: bool, dtype: torch.dtype = torch.float16) -> TunedTensors:
    given = torch.zeros(64, 24) if latent else torch.zeros(64, 24, dtype=torch.uint8)
    return TunedTensors(given, *(torch.ones(2, 24) for _ in range(3)), dtype, 15, 0.45)


@pytest.mark.parametrize("architecture", MAIN_FIRST)
def test_no_kernel_of_tuned_weights_spills(architecture: str) -> None:
    for number, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32)):
        made, out = tuned(latent=number != 1, dtype=dtype), (torch.float32, torch.bfloat16)[number % 2]
        for function in ("tuned_weight", "tuned_gradients"):
            compiled = compile_kernel(tuned_instantiation(function, made, out), architecture)
            assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


def test_tensors_that_tuning_kernels_cannot_read_are_refused() -> None:
    made, wide = tuned(latent=True), torch.zeros(64, 24)
    prepare_weight(made, wide)
    with pytest.raises(ValueError, match=r"out: expected a contiguous \[64, 24\]"):
        prepare_weight(made, torch.zeros(24, 64).t())
    with pytest.raises(ValueError, match=r"given: expected .*, found .* of torch.float16"):
        prepare_weight(made._replace(given=wide.half()), wide)
    with pytest.raises(ValueError, match="no multiple of 2 groups"):
        prepare_weight(made._replace(given=wide[:63]), wide)
    with pytest.raises(ValueError, match="latent codes have a gradient"):
        prepare_gradients(made, wide, made.change, None)


@pytest.mark.gpu
@pytest.mark.parametrize("latent", [True, False])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_tuned_weights_are_those_of_torch(out: torch.dtype, latent: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 1536, generator=generator)
    quantized = round_to_nearest(weight, scheme(group_size=128, symmetric=False))
    moved = 0.1 * torch.randn(quantized.scales.shape, generator=generator)
    direction = torch.randn(200, 1536, generator=generator).to(out)
    found = []
    for device in ("cpu", "cuda"):
        made = TunableWeight(quantized.to(torch.device(device)), weight.to(device) if latent else None)
        with torch.no_grad():
            made.change += moved.to(device)
        dense = made.dense(out)
        dense.backward(direction.to(device))
        found.append([dense.cpu(), *(leaf.grad.cpu() for leaf in made.parameters().values())])
    expected, fused = found
    assert torch.equal(fused[0], expected[0])
    if latent:
        assert torch.equal(fused[2], expected[2])
    # A group's 128 products in another order, and once more by the scale.
    sums = (direction.float().abs().t() * 16).reshape(12, 128, 200).sum(1).max()
    atol = 128 * 2.0**-24 * float(sums * quantized.scales.abs().max())
    torch.testing.assert_close(fused[1], expected[1], rtol=0, atol=atol)
