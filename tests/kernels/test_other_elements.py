"""Weights of 8-bit codes as kernels read them: words, scales of every granularity, the reference product."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from marlinq.core.errors import UnsupportedError
from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT8, Element, Scheme, TensorScale
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import LAYOUTS, StoredWeight, spec_of
from marlinq.kernels import GEMMS
from marlinq.kernels.contract.weight_formats import WEIGHT_FORMATS
from marlinq.kernels.contract.weight_formats.byte_order import pack_bytes, unpack_bytes
from marlinq.operations.inspect.eligibility import OWN_ELEMENTS
from marlinq.runtime import OPERATORS, Setting, decide
from marlinq.runtime.kernel_operand import marlin_operand
from marlinq.runtime.quant_linear import QuantLinear
from tests.kernels.problems import BOUND, relative_error

GRANULARITIES = {
    "tensor": Granularity.tensor(),
    "channel": Granularity.channel(),
    "groups of 32": Granularity.group(32),
    "groups of 192": Granularity.group(192),
    "blocks": Granularity.block(128, 128),
}


def random_weight(
    element: Element, granularity: Granularity, k: int, n: int, *, zeros: bool = False, size: float = 0.01
) -> QuantizedWeight:
    """Random codes with scales of about ``size`` in float32, as FP8 checkpoints store them."""
    codes = torch.randint(0, 256, (k, n), dtype=torch.uint8)
    if element == E4M3:
        codes[(codes & 0x7F) == 0x7F] = 1
    shape = granularity.scales_shape(k, n)
    scheme = Scheme(element, granularity, "stored" if zeros else element.zero_point, "float32")
    points = torch.randint(0, 256, shape, dtype=torch.uint8) if zeros else None
    return QuantizedWeight.from_codes(scheme, codes, scales=size * (0.5 + torch.rand(shape)), zeros=points)


def test_a_lane_finds_its_codes_where_the_header_says() -> None:
    codes = torch.randint(0, 256, (32, 128), dtype=torch.uint8)
    words = pack_bytes(codes)
    assert (words.shape, words.dtype) == ((2, 512), torch.int32)
    assert torch.equal(unpack_bytes(words), codes)
    bytes_ = words.view(torch.uint8).view(2, 2, 2, 32, 2, 2, 4)  # kt, nt, plane, lane, block, row, byte
    for kt, nt, plane, lane, block, row, byte in (
        (0, 0, 0, 0, 0, 0, 1),
        (1, 1, 1, 23, 1, 1, 2),
        (0, 1, 0, 6, 1, 0, 3),
    ):
        k = 16 * kt + 2 * (lane % 4) + byte // 2 + 8 * (byte % 2)
        n = 64 * nt + 16 * (2 * plane + block) + lane // 4 + 8 * row
        assert bytes_[kt, nt, plane, lane, block, row, byte] == codes[k, n]


@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES.keys())
@pytest.mark.parametrize(("element", "zeros"), [(INT8, False), (INT8, True), (E4M3, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_operand_holds_the_weight(
    element: Element, zeros: bool, granularity: Granularity, dtype: torch.dtype
) -> None:
    q = random_weight(element, granularity, 320, 200, zeros=zeros)
    operand = marlin_operand(q, dtype)
    assert operand.format is WEIGHT_FORMATS[element.name]
    assert operand.padded_shape == (384 if granularity.channels == 128 else 320, 256)
    found = operand.dequantize(torch.float32)
    assert not found[320:].any()
    assert not found[:, 200:].any()
    # Scales are rounded to the dtype, and nothing else.
    torch.testing.assert_close(found[:320, :200], q.dequantize().t(), rtol=torch.finfo(dtype).eps / 2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("element", [INT8, E4M3], ids=lambda element: element.name)
def test_the_operators_reference_multiplies_with_it(element: Element, dtype: torch.dtype) -> None:
    q = random_weight(element, Granularity.group(64), 256, 128)
    operand = marlin_operand(q, dtype)
    x = torch.randn(5, 256).to(dtype)
    found = GEMMS[element.name](x, operand.words, operand.scales, None, None, 64, 100)
    expected = (x.float() @ operand.dequantize(torch.float32))[:, :100].to(dtype)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("element", [INT8, E4M3], ids=lambda element: element.name)
def test_a_linear_keeps_its_weight_in_another_dtype(element: Element) -> None:
    q = random_weight(element, Granularity.group(64), 256, 128)
    linear = QuantLinear(marlin_operand(q, torch.float32))
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        linear = linear.to(dtype)
        assert linear.scales.dtype == dtype
        found = linear.operand.dequantize(torch.float32)
        torch.testing.assert_close(found, q.dequantize().t(), rtol=2.0**-7, atol=0)


def test_small_scales_keep_their_bits_in_float16() -> None:
    # A tensor's scale of 2^-15 would be subnormal, with few bits left.
    q = random_weight(E4M3, Granularity.channel(), 64, 64, size=2.0**-16)
    found = marlin_operand(q, torch.float16).dequantize(torch.float32)
    torch.testing.assert_close(found, q.dequantize().t(), rtol=2.0**-11, atol=0)


def test_codes_without_a_value_are_refused() -> None:
    q = random_weight(E4M3, Granularity.channel(), 64, 64)
    q.codes[3, 5] = 0xFF
    with pytest.raises(UnsupportedError, match=r"NaN \(code 0xff of fp8_e4m3\)"):
        marlin_operand(q, torch.float16)
    large = random_weight(E4M3, Granularity.channel(), 64, 64, size=1000.0)
    with pytest.raises(UnsupportedError, match="overflows float16; run in bfloat16"):
        marlin_operand(large, torch.float16)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_levels_of_scales_are_rounded_once(dtype: torch.dtype, divides: bool) -> None:
    codes = torch.randint(0, 16, (128, 64), dtype=torch.uint8)
    second = torch.tensor(3.0e-5 if not divides else 3.0e4)
    use: TensorScale = "divides" if divides else "multiplies"
    scheme = Scheme(E2M1, Granularity.group(16), "none", "float8_e4m3fn", use)
    scales = (torch.rand(8, 64) * 400 + 1).to(torch.float8_e4m3fn)
    q = QuantizedWeight.from_codes(scheme, codes, scales=scales, tensor_scale=second)
    operand = marlin_operand(q, dtype)
    assert operand.granularity == Granularity.group(16)
    torch.testing.assert_close(
        operand.dequantize(torch.float32), q.dequantize().t(), rtol=torch.finfo(dtype).eps / 2 * 1.001, atol=0
    )


def test_powers_of_two_are_exact_scales() -> None:
    codes = torch.randint(0, 16, (128, 64), dtype=torch.uint8)
    scheme = Scheme(E2M1, Granularity.group(32), "none", "float8_e8m0fnu")
    scales = torch.exp2(torch.randint(-14, 0, (4, 64)).float()).to(torch.float8_e8m0fnu)
    q = QuantizedWeight.from_codes(scheme, codes, scales=scales)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(marlin_operand(q, dtype).dequantize(torch.float32), q.dequantize().t())


def test_scales_that_bfloat16_can_not_take_along_are_refused() -> None:
    large = random_weight(E4M3, Granularity.channel(), 64, 64, size=1000.0)
    with pytest.raises(UnsupportedError, match="below 256: run in float16"):
        marlin_operand(large, torch.bfloat16)


def test_inspect_knows_the_elements_that_have_kernels() -> None:
    dense = {name for name, each in WEIGHT_FORMATS.items() if each.codec is not None and not each.sparsity}
    assert set(OWN_ELEMENTS) == dense


CONTAINERS = {
    "fp8": (E4M3, Granularity.block(128, 128), "float32", "none"),
    "float-quantized": (E4M3, Granularity.channel(), "float32", "none"),
    "mxfp4-pack-quantized": (E2M1, Granularity.group(32), "float8_e8m0fnu", "none"),
    "nvfp4-pack-quantized": (E2M1, Granularity.group(16), "float8_e4m3fn", "divides"),
}
"""By the layout's name: element, granularity, dtype of the scales and the second level."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", CONTAINERS)
def test_a_stored_weight_is_multiplied_by_its_operator(layout: str, dtype: torch.dtype) -> None:
    element, granularity, scale_dtype, second = CONTAINERS[layout]
    codes = torch.randint(0, element.codes, (384, 256), dtype=torch.uint8)
    codes[element.decode(codes).isnan()] = 1
    shape = granularity.scales_shape(384, 256)
    scales = torch.exp2(torch.randint(-9, -5, shape).float()).to(getattr(torch, scale_dtype))
    scheme = Scheme(element, granularity, "none", scale_dtype, cast("TensorScale", second))
    q = QuantizedWeight.from_codes(
        scheme, codes, scales=scales, tensor_scale=None if second == "none" else torch.tensor(3.0)
    )
    packer = LAYOUTS[layout]
    stored = StoredWeight("module", packer, replace(spec_of(q), scheme=q.scheme), packer.pack(q))
    setting = Setting(torch.device("cpu"), dtype)
    name = "w8a16" if element == E4M3 else "fp4a16"
    assert decide(stored, setting, operator=name).operator == name
    x = torch.randn(3, 384).to(dtype)
    expected = x.double() @ q.dequantize().double().t()
    found = OPERATORS[name].build(stored, None, setting)(x)
    assert relative_error(found, expected) < BOUND[dtype]
