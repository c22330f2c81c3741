"""FP8 activations on a GPU: quantised as the reference says, and multiplied."""

from __future__ import annotations

import pytest
import torch

from marlinq.kernels import device_numbers
from marlinq.kernels.contract.weight_formats import E4M3
from marlinq.kernels.launch.eight_bit_product import plain_bytes, quantize_rows
from marlinq.kernels.ops.fp8_a8 import fp8_a8_gemm
from marlinq.operations.bench.timing import capture
from tests.kernels.problems import random_operands, relative_error

pytestmark = pytest.mark.gpu
BATCHES = (1, 3, 16, 130, 512, 777, 2048)


@pytest.fixture(autouse=True)
def ada() -> None:
    if device_numbers(0).capability < 89:
        pytest.skip("FP8 products need compute capability 8.9")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "given"), [(0, False), (0, True), (128, False)])
def test_rows_are_those_of_the_reference(dtype: torch.dtype, group: int, given: bool) -> None:
    for m, k in ((1, 128), (7, 14336), (300, 1024)):
        x = (torch.randn(m, k) * torch.exp2(torch.randint(-9, 5, (m, 1)).float())).to(dtype)
        scale = torch.tensor(0.03) if given else None
        codes, scales = quantize_rows(x.cuda(), group, None if scale is None else scale.cuda())
        expected, of_rows = quantize_rows(x, group, scale)
        assert torch.equal(codes[:m].view(torch.uint8).cpu(), expected.view(torch.uint8))
        assert torch.equal(scales[:m].cpu(), of_rows)


@pytest.mark.parametrize(("k", "n"), [(64, 64), (1024, 4096), (4160, 192)])
def test_bytes_of_weights_are_in_order(k: int, n: int) -> None:
    made = random_operands(k, n, -1, torch.bfloat16, weight_format=E4M3)
    expected = E4M3.values(made.words, torch.float32).t()
    assert torch.equal(plain_bytes(made.operand).float(), expected)


@pytest.mark.parametrize("group", [-1, 128])
@pytest.mark.parametrize("static", [False, True])
def test_products(group: int, static: bool) -> None:
    if group == 128 and (static or device_numbers(0).capability != 90):
        pytest.skip("scales by group are dynamic, and of compute capability 9.0")
    for k, n in ((1024, 576), (4096, 1024)):
        made = random_operands(k, n, group, torch.bfloat16, bias=True, weight_format=E4M3)
        assert made.bias is not None
        for m in BATCHES:
            x = torch.randn(m, k, device="cuda").bfloat16()
            scale = torch.tensor(6 / 448, device="cuda") if static else None
            given = made.words, made.scales, made.bias, scale, group, n - 10
            found = fp8_a8_gemm(x, made.words, made.scales, made.bias[: n - 10], *given[3:])
            cpu = [None if value is None else value.cpu() for value in (x, made.words, made.scales)]
            expected = fp8_a8_gemm(
                *cpu, made.bias[: n - 10].cpu(), None if scale is None else scale.cpu(), group, n - 10
            )  # type: ignore[arg-type]
            # The same rounded operands; results are rounded to 8 bits, sums of tensor cores to 13 or more.
            error = relative_error(found.cpu(), expected.double())
            assert error < 5e-3, f"M={m} K={k} N={n}: {error:.1e}"


def test_a_graph_holds_it() -> None:
    made = random_operands(1024, 512, -1, torch.bfloat16, weight_format=E4M3)
    x = torch.randn(256, 1024, device="cuda").bfloat16()
    out: list[torch.Tensor] = []
    first = fp8_a8_gemm(x, made.words, made.scales, None, None, -1, 512)
    recording = capture(
        lambda _: out.append(fp8_a8_gemm(x, made.words, made.scales, None, None, -1, 512)) or out[-1], 1
    )
    recording.graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[-1], first)
