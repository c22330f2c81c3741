"""The CPU reference and the op's shape function, without a GPU."""

from __future__ import annotations

import pytest
import torch

from marlinq.kernels import w4a16_gemm
from tests.kernels.problems import BOUND, random_operands, relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_reference_is_the_dense_product(dtype: torch.dtype, group: int, zeros: bool) -> None:
    operands = random_operands(256, 192, group, dtype, zeros=zeros, bias=True, device="cpu")
    x = torch.randn(2, 3, 256).to(dtype)
    found = w4a16_gemm(x, operands.words, operands.scales, operands.zeros, operands.bias, group, 192)
    assert found.shape == (2, 3, 192)
    assert found.dtype == dtype
    error = relative_error(found.reshape(-1, 192), operands.reference(x.reshape(-1, 256)))
    assert error < BOUND.get(dtype, 1e-6)


def test_an_order_picks_columns_and_leaves_out_padding() -> None:
    operands = random_operands(128, 64, 64, torch.float32, device="cpu")
    x = torch.randn(3, 100)
    order = torch.cat([torch.randperm(100), torch.full((28,), -1)]).to(torch.int32)
    found = w4a16_gemm(x, operands.words, operands.scales, None, None, 64, 64, order)
    gathered = torch.nn.functional.pad(x[:, order[:100].long()], (0, 28))
    assert relative_error(found, operands.reference(gathered)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_meta_function_agrees_with_the_result(dtype: torch.dtype) -> None:
    operands = random_operands(128, 64, 64, dtype, device="cpu")
    x = torch.randn(5, 128).to(dtype)
    arguments = (x, operands.words, operands.scales, None, None, 64, 60)
    torch.library.opcheck(torch.ops.marlinq.w4a16_gemm.default, arguments)
    meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments]
    for shape in ((128,), (5, 128), (2, 5, 128), (0, 128)):
        found = w4a16_gemm(torch.zeros(shape, dtype=dtype), *arguments[1:])
        expected = torch.ops.marlinq.w4a16_gemm(torch.zeros(shape, dtype=dtype, device="meta"), *meta[1:])
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64)}, "x: expected 128 columns"),
        ({"words": torch.zeros(8, 130, dtype=torch.int32)}, "words: expected int32"),
        ({"scales": torch.zeros(2, 64, dtype=torch.float64)}, "scales: expected torch.float32"),
        ({"bias": torch.zeros(65)}, "bias: expected torch.float32"),
        ({"out_features": 65}, "out_features: expected 1..64"),
        ({"group_size": 128}, r"scales: expected torch.float32 \[1, 64\] with group size 128"),
        ({"zeros": torch.zeros(1, 64)}, r"zeros: expected torch.float32 \[2, 64\]"),
        ({"scales": torch.zeros(64, 2).T}, "scales: expected a contiguous tensor on cpu"),
        ({"order": torch.arange(128)}, r"order: expected int32 \[128\], found torch.int64 \[128\]"),
        ({"order": torch.zeros(64, dtype=torch.int32)}, r"order: expected int32 \[128\]"),
        ({"order": torch.zeros(256, dtype=torch.int32)[::2]}, "order: expected a contiguous tensor on cpu"),
        ({"bias": torch.zeros(128)[::2]}, "bias: expected a contiguous tensor on cpu"),
    ],
)
def test_operands_that_do_not_fit_are_named(change: dict[str, object], message: str) -> None:
    operands = random_operands(128, 64, 64, torch.float32, device="cpu")
    arguments: dict[str, object] = {
        "x": torch.zeros(2, 128),
        "words": operands.words,
        "scales": operands.scales,
        "zeros": None,
        "bias": None,
        "group_size": 64,
        "out_features": 64,
    }
    with pytest.raises(ValueError, match=message):
        w4a16_gemm(**(arguments | change))  # type: ignore[arg-type]
