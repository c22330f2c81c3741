"""Weight formats: decisions and operators ask them, and another one can stand beside the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.formats.layouts.marlin import permute_scales, unpack_tiles
from marlinq.kernels import (
    Device,
    Operand,
    batch_invariant,
    decide,
    forced_kernel,
    reference_gemm,
)
from marlinq.kernels.choose import dequantized_estimate
from marlinq.kernels.choose.decision import DEQUANTIZE, model_choice
from marlinq.kernels.contract.demands import demands
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import INT4, WEIGHT_FORMATS, WeightFormat, register_weight_format
from marlinq.kernels.launch.dequantized_product import dequantized_gemm
from marlinq.kernels.ops.gemm import GemmOperator
from marlinq.kernels.variants.stages import weight_bytes
from tests.kernels.problems import int4_problem, random_operands

A100 = Device("sm_80", 108, 166_912, bandwidth=1.87e12, clock=1.25e9)
B200 = Device("sm_100a", 148, 232_448, bandwidth=7.3e12, clock=1.7e9)


def toy_values(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of a toy format: four channels of a column a word, one byte each."""
    rows, columns = words.shape
    return (
        words.contiguous()
        .view(torch.uint8)
        .view(rows, columns, 4)
        .transpose(1, 2)
        .reshape(-1, columns)
        .to(dtype)
    )


TOY = WeightFormat(
    name="toy8",
    operator="toy_w8a16_gemm",
    bits=8,
    row_channels=4,
    scale="quant_group",
    midpoint=128.0,
    stores_zeros=True,
    values=toy_values,
    pack=lambda codes: codes,
    in_order=lambda scales: scales,
    codec=None,
    half_scale_power=0,
    unpack=(9, 11),
    dequantizing_bytes=12.0,
)


@pytest.fixture(scope="module")
def toy_operator() -> Iterator[GemmOperator]:
    yield GemmOperator(register_weight_format(TOY))
    del WEIGHT_FORMATS[TOY.name]


def toy_weight(k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], their words, and scales of groups of 64."""
    codes = torch.randint(0, 256, (k, n), dtype=torch.uint8)
    words = codes.view(k // 4, 4, n).transpose(1, 2).contiguous().view(torch.int32)[..., 0]
    return codes, words.contiguous(), torch.rand(k // 64, n) + 0.5


def test_four_bits_are_as_the_layout_says() -> None:
    operands = random_operands(320, 192, 64, torch.float16, device="cpu", zeros=True)
    codes = unpack_tiles(operands.words)
    assert torch.equal(INT4.values(operands.words, torch.float16), codes.half())
    # A slice of columns, which is not contiguous.
    assert torch.equal(INT4.values(operands.words[:, 128:256], torch.float32), codes[:, 64:128].float())
    assert operands.zeros is not None
    scales, zeros = (
        permute_scales(stored).float().repeat_interleave(64, 0)
        for stored in (operands.scales, operands.zeros)
    )
    expected = (codes.float() - zeros) * scales
    assert torch.equal(operands.operand.dequantize(torch.float32), expected)
    half = INT4.dequantize(operands.words, operands.scales, operands.zeros, torch.float16)
    # Codes minus zero points are exact, so a weight is rounded once.
    assert torch.equal(half, expected.half())
    assert (INT4.shape(operands.words), INT4.row_bytes, INT4.row_words) == ((320, 192), 8, 2)


def test_another_format_has_an_operator_beside_it(toy_operator: GemmOperator) -> None:
    codes, words, scales = toy_weight(256, 128)
    x = torch.randn(3, 256)
    expected = x @ ((codes.float() - 128) * scales.repeat_interleave(64, 0))
    operand = Operand.whole(TOY, Granularity.group(64), words, scales, None)
    found = torch.ops.marlinq.toy_w8a16_gemm(x, words, scales, None, None, 64, 128)
    assert torch.equal(found, expected)
    assert torch.equal(reference_gemm(x, operand, None, 128), expected)
    on_meta = (tensor.to("meta") for tensor in (x, words, scales))
    assert toy_operator.overload(*on_meta, None, None, 64, 100).shape == (3, 100)
    with pytest.raises(ValueError, match=r"int32 \[K/4, 1N\]"):
        toy_operator.overload(x, words[:, :100].contiguous(), scales, None, None, 64, 100)
    assert torch.ops.marlinq.w4a16_gemm.default is not toy_operator.overload


def test_two_formats_of_one_name_are_refused(toy_operator: GemmOperator) -> None:
    assert register_weight_format(TOY) is TOY
    with pytest.raises(ValueError, match="toy8"):
        register_weight_format(replace(TOY, bits=4))


def test_a_format_without_a_codec_is_dequantised(toy_operator: GemmOperator) -> None:
    for device in (H200, A100):
        for m in (1, 64, 4096):
            decision = decide(int4_problem(m, 4096, 4096, 128, False, False, TOY), device)
            assert (decision.kernel, decision.config) == (DEQUANTIZE, None)
            assert "no kernel has a codec for toy8" in decision.reason


def test_decisions_count_the_bytes_of_the_format() -> None:
    wide = replace(INT4, name="wide", bits=8, midpoint=128.0)
    narrow, twice = (int4_problem(1, 28672, 8192, -1, False, False, one) for one in (INT4, wide))
    assert weight_bytes(twice, 128, 8) == 2 * weight_bytes(narrow, 128, 8) == 2 * 8 * 128 * 8
    with forced_kernel("bulk"):
        ratio = decide(twice, H200).seconds / decide(narrow, H200).seconds
    # A few of the 30 and 60 us pass beside the weights' own time.
    assert 1.6 < ratio < 2.1


@pytest.mark.parametrize("device", [A100, B200])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 14336)])
def test_large_batches_are_dequantised_once_without_warpgroups(device: Device, n: int, k: int) -> None:
    def chosen(m: int) -> str:
        return decide(int4_problem(m, n, k, 128, False, False), device).kernel

    assert chosen(256) == "stream"
    assert chosen(65536) == DEQUANTIZE
    batches = [2**i for i in range(8, 17)]
    kernels = [chosen(m) for m in batches]
    # One crossover, where the model says that it is clearly faster.
    assert kernels == sorted(kernels, reverse=True)
    problem = int4_problem(65536, n, k, 128, False, False)
    decision = decide(problem, device)
    kernel = model_choice(problem, device, demands())[0]
    assert decision.seconds == dequantized_estimate.estimate(problem, device)
    assert decision.seconds < dequantized_estimate.MARGIN * kernel
    assert f"the fastest kernel takes about {kernel * 1e6:.1f} us" in decision.reason
    assert "unmeasured GPU" in decision.reason


def test_neither_warpgroups_nor_an_order_of_sums_are_given_up_for_it() -> None:
    problem = int4_problem(65536, 4096, 4096, 128, False, False)
    assert decide(problem, H200).kernel == "warpgroup"
    with batch_invariant():
        assert decide(problem, B200).kernel == "stream"
    with forced_kernel("stream"):
        assert decide(problem, B200).kernel == "stream"
    with forced_kernel("dequantise"):
        assert "asked for" in decide(replace(problem, m=1), H200).reason


@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 5).map(lambda i: 64 * i),
    k=st.sampled_from([128, 384]),
    group=st.sampled_from([32, 128, -1]),
    zeros=st.booleans(),
    bias=st.booleans(),
    columns=st.integers(0, 400),
)
def test_the_dense_product_in_any_workspace(
    m: int, n: int, k: int, group: int, zeros: bool, bias: bool, columns: int
) -> None:
    operands = random_operands(k, n, group, torch.float16, device="cpu", zeros=zeros, bias=bias)
    x = torch.randn(m, k).half()
    out = torch.full((m, n), torch.nan).half()
    given = ProductTensors(x, operands.operand, operands.bias, out)
    dequantized_gemm(given, workspace_bytes=2 * k * columns)
    whole = torch.empty(m, n).half()
    dequantized_gemm(given._replace(out=whole))
    expected = operands.reference(x)
    # Weights and sums are rounded to float16: 2^-11 each.
    assert (out - expected).norm() < 2**-10 * expected.norm()
    assert (whole - expected).norm() < 2**-10 * expected.norm()
