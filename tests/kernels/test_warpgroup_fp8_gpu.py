"""4-bit weights with FP8 activations on a GPU of compute capability 9.0: results beside float64's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.choose.eight_bit_decision import BESIDE_INT4
from marlinq.kernels.launch.eight_bit_product import quantize_rows
from marlinq.kernels.launch.w4a8_product import w4a8_product
from marlinq.kernels.ops.w4a8 import w4a8_gemm
from marlinq.runtime.quant_linear import QuantLinear
from tests.kernels.problems import BOUND, Operands, random_operands, relative_error

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="the kernel is for compute capability 9.0"),
]


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Random activations [m, k], of another size in each group of a row."""
    sizes = torch.exp2(torch.randint(-3, 4, (m, k // 128), device="cuda").float())
    return (torch.randn(m, k, device="cuda") * sizes.repeat_interleave(128, 1)).to(dtype)


def expected(made: Operands, x: Tensor, group: int) -> Tensor:
    """The float64 result of the rounded activations; codes and scales have rows up to a multiple of four."""
    codes, scales = (each[: len(x)] for each in quantize_rows(x, group))
    rounded = codes.float().double().view(len(x), -1, group or x.shape[1]) * scales.double()[..., None]
    return made.reference(rounded.flatten(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [128, 0])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (320, 1408), (6144, 4096)])
def test_products_of_rounded_activations(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    made = random_operands(k, n, 128, dtype, bias=True)
    for m in (1, 7, 128, 129, 500, 1024, 2050):
        x = activations(m, k, dtype)
        found = w4a8_product(x, made.operand, made.bias, group)
        # FP8 products keep 13 bits behind their largest term, far below the rounding of results.
        assert relative_error(found, expected(made, x, group)) < BOUND[dtype], (m, n, k)
        assert torch.equal(found, w4a8_product(x, made.operand, made.bias, group))


def test_the_operator_and_the_linear_agree_with_the_cpu() -> None:
    torch.manual_seed(0)
    made = random_operands(512, 256, 128, torch.bfloat16, bias=True)
    x = activations(600, 512, torch.bfloat16)[:, None]
    given = made.words, made.scales, made.bias[:200]
    found = w4a8_gemm(x, *given, 200)
    on_cpu = w4a8_gemm(x.cpu(), *(tensor.cpu() for tensor in given), 200)
    assert found.shape == (600, 1, 200)
    assert relative_error(found.cpu(), on_cpu.double()) < 2 * BOUND[torch.bfloat16]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = w4a8_gemm(x, *given, 200)
    graph.replay()
    assert torch.equal(captured, found)


def test_a_linear_rounds_large_batches_alone() -> None:
    made = random_operands(512, 256, 128, torch.float16)
    linear = QuantLinear(replace(made.operand, activations=BESIDE_INT4))
    assert linear.rounds
    x = activations(1024, 512, torch.float16)
    exact = made.reference(x)
    assert relative_error(linear(x[:16]), exact[:16]) < BOUND[torch.float16]
    assert relative_error(linear(x), expected(made, x, 0)) < BOUND[torch.float16]
    assert 2.0**-7 < relative_error(linear(x), exact) < 2.0**-4


def test_a_single_group_is_a_scale_per_channel_and_refused() -> None:
    made = random_operands(128, 64, 128, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="groups of 128, found one scale per channel"):
        w4a8_gemm(activations(4, 128, torch.bfloat16), made.words, made.scales, None, 64)
