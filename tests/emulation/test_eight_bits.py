"""Activations as FP8 and weights in cuBLAS's order: on the emulation, bit for bit the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from marlinq.kernels.contract.weight_formats.byte_order import pack_bytes
from marlinq.kernels.driver.compiler import compile_kernel
from marlinq.kernels.launch import eight_bit_product
from tests.emulation.gemm import SOURCES
from tests.emulation.test_warpgroup_fp8 import fragments, pairs_of_sums


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Activations of many sizes, with a row of zeros, and a zero group in another."""
    torch.manual_seed(m + k)
    x = torch.randn(m, k) * torch.exp2(torch.randint(-12, 5, (m, k)).float())
    x[-1] = 0
    x[0, : k // 2] = 0
    return x.to(dtype)


def quantized(
    builder: Builder,
    x: Tensor,
    group: int,
    given: Tensor | None,
    planted: Planted | None = None,
    *,
    fragments: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, sums) that the kernel makes of ``x``: scales in the launcher's shape, without rows past
    M; sums only with ``fragments``."""
    m, k = x.shape
    rows, of_scales = eight_bit_product.quantized_shapes(m, k, group)
    # Rows of x further apart than their channels.
    x = apart(torch.nn.functional.pad(x, (0, 64)))[:, :k]
    codes = apart(torch.zeros(rows, dtype=torch.uint8))
    scales = apart(torch.full(of_scales, torch.nan))
    width = eight_bit_product.sums_width(k) if fragments else 0
    sums = apart(torch.full((m, width), torch.nan, dtype=x.dtype))
    given = None if given is None else apart(given.reshape(1))
    text = eight_bit_product.row_instantiation(
        x.dtype, group, given=given is not None, fragments=fragments
    ).text()
    kernel = EmulatedKernel(builder.kernel(text, "quantize_rows", SOURCES, planted=planted))
    memory = [Memory("x", x), Memory("codes", codes, writable=True), Memory("scales", scales, writable=True)]
    if fragments:
        memory.append(Memory("sums", sums, writable=True))
    address = 0
    if given is not None:
        memory.append(Memory("given", given))
        address = given.data_ptr()
    arguments = eight_bit_product.RowArguments(
        *(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), address, sums.data_ptr()),
        *(k, rows[0], x.stride(0)),
    )
    kernel.launch(m, eight_bit_product.ROW_THREADS, 0, arguments, memory)
    return codes[:m], scales.t()[:m] if group else scales[:, None], sums


@pytest.mark.parametrize(
    ("m", "k", "group", "dtype", "given"),
    [
        (3, 192, 0, torch.bfloat16, None),
        (2, 4096 + 64, 0, torch.float16, None),
        (3, 384, 128, torch.bfloat16, None),
        (2, 192, 0, torch.bfloat16, 0.013),
    ],
)
def test_rows_are_quantised_in_one_launch(
    builder: Builder, m: int, k: int, group: int, dtype: torch.dtype, given: float | None
) -> None:
    x = activations(m, k, dtype)
    scale = None if given is None else torch.tensor(given)
    codes, scales, _ = quantized(builder, x, group, scale)
    expected, of_rows = eight_bit_product.quantize_rows(x, group, scale)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert torch.equal(scales, of_rows)


@pytest.mark.parametrize(("k", "group"), [(384, 128), (2048 + 128, 0)])
def test_codes_lie_in_the_order_of_fragments(builder: Builder, k: int, group: int) -> None:
    x = activations(2, k, torch.bfloat16)
    codes, scales, sums = quantized(builder, x, group, None, fragments=True)
    expected, of_rows = eight_bit_product.quantize_rows(x, group)
    assert torch.equal(codes, fragments(expected.view(torch.uint8)))
    assert torch.equal(scales, of_rows)
    assert sums_are_near(sums, expected, of_rows)


def sums_are_near(sums: Tensor, codes: Tensor, scales: Tensor) -> bool:
    """Whether pairs add up to the sums of ``codes`` [M, K], and are 0 behind them."""
    m, k = codes.shape
    wanted = pairs_of_sums(codes, scales, sums.dtype).view(m, -1, 2).double().sum(-1)
    errors = (sums.view(m, -1, 2).double().sum(-1) - wanted).abs()
    terms = codes.double().abs().view(m, -1, 128).sum(-1) * (scales if scales.shape[1] > 1 else 1) / 64
    # Two of bfloat16's 8 bits; and float32's sums of 128 terms, which cancel, in another order.
    bound = 2.0**-16 * wanted[:, : k // 128].abs() + 2.0**-20 * terms
    return bool((errors[:, : k // 128] <= bound).all() and not errors[:, k // 128 :].any())


@pytest.mark.parametrize("fault", ["order", "sums"])
def test_faults_planted_into_fragments_are_seen(builder: Builder, fault: str) -> None:
    x = activations(2, 128, torch.bfloat16)
    codes, _, sums = quantized(builder, x, 128, None, FRAGMENT_FAULTS[fault], fragments=True)
    expected, scales = eight_bit_product.quantize_rows(x, 128)
    as_expected = {
        "order": torch.equal(codes, fragments(expected.view(torch.uint8))),
        "sums": sums_are_near(sums, expected, scales),
    }
    assert not as_expected[fault]


FRAGMENT_FAULTS = {
    "order": Planted("fragment_order", "0x3210u"),
    "sums": Planted("code_sums", "0.015625f"),
}
ROW_FAULTS = {
    "bytes exchanged": (Planted("e4m3_order", '"f"(low), "f"(high)'), 0),
    "a scale's reciprocal": (Planted("group_scale", "LARGEST / amax"), 128),
    "maxima read too early": (Planted("row_maxima_there"), 0),
}
PLAIN_FAULTS = {
    "bytes in the words' order": Planted("plain_order", "0x3210u"),
    "pairs read too early": Planted("plain_pairs_there"),
}


@pytest.mark.parametrize("name", ROW_FAULTS)
def test_faults_planted_into_rows_are_seen(builder: Builder, name: str) -> None:
    planted, group = ROW_FAULTS[name]
    x = activations(2, 256, torch.bfloat16)
    expected, of_rows = eight_bit_product.quantize_rows(x, group)
    try:
        codes, scales, _ = quantized(builder, x, group, None, planted)
    except KernelFault:
        return
    assert not (torch.equal(codes, expected.view(torch.uint8)) and torch.equal(scales, of_rows))


def plain(builder: Builder, codes: Tensor, planted: Planted | None = None) -> Tensor:
    k, n = codes.shape
    words, found = apart(pack_bytes(codes)), apart(torch.zeros(n, k, dtype=torch.uint8))
    kernel = EmulatedKernel(
        builder.kernel(
            eight_bit_product.plain_instantiation().text(), "plain_bytes", SOURCES, planted=planted
        )
    )
    arguments = eight_bit_product.PlainArguments(words.data_ptr(), found.data_ptr(), k, n)
    memory = [Memory("words", words), Memory("plain", found, writable=True)]
    kernel.launch(n // 64 * -(-k // 128), eight_bit_product.PLAIN_THREADS, 0, arguments, memory)
    return found


@pytest.mark.parametrize(("k", "n"), [(64, 64), (192, 128)])
def test_bytes_are_brought_into_cublas_order(builder: Builder, k: int, n: int) -> None:
    codes = torch.randint(0, 256, (k, n), dtype=torch.uint8)
    assert torch.equal(plain(builder, codes), codes.t())


@pytest.mark.parametrize("name", PLAIN_FAULTS)
def test_faults_planted_into_the_order_are_seen(builder: Builder, name: str) -> None:
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    try:
        found = plain(builder, codes, PLAIN_FAULTS[name])
    except KernelFault:
        return
    assert not torch.equal(found, codes.t())


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a", "sm_120a"])
def test_they_compile_without_spills(architecture: str) -> None:
    wanted = [
        *(
            eight_bit_product.row_instantiation(torch.bfloat16, group, given=given)
            for group, given in ((0, False), (0, True), (128, False))
        ),
        eight_bit_product.plain_instantiation(),
    ]
    for instantiation in wanted:
        compiled = compile_kernel(instantiation, architecture)
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
