"""The sparse kernel's operand, choice and compilation; its products on a GPU."""

from __future__ import annotations

import pytest
import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels import Device
from marlinq.kernels.driver.compiler import compile_text
from marlinq.kernels.sparse import (
    GROUPS,
    SparseConfig,
    candidates,
    choose,
    sparse_gemm,
    sparse_operand,
    sparse_refusal,
)
from marlinq.kernels.sparse import config as configuration
from tests.kernels.problems import BOUND, relative_error
from tests.kernels.sparse_problems import expected, random_sparse
from tests.testing.architectures import QUICK

H200 = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)
A100 = Device("sm_80", multiprocessors=108, shared_bytes=166_912)


@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_the_operand_holds_the_weight(group_size: int) -> None:
    q = random_sparse(256, 128, group_size)
    operand = sparse_operand(q, torch.float16)
    assert torch.equal(operand.dequantize(torch.float32), q.dequantize())
    assert (operand.in_features, operand.out_features) == (256, 128)
    scales = operand.scales.nbytes
    assert operand.nbytes - scales == 256 * 128 * 3 // 8


def test_lanes_find_their_masks() -> None:
    """One descriptor at a time, by the formula of the kernel's header."""
    q = random_sparse(64, 128, -1, seed=3)
    masks = sparse_operand(q, torch.float16).masks.reshape(2, 2, 32, 2)
    values = q.dequantize().t()  # [K, N]
    for kt in range(2):
        for nt in range(2):
            for lane in (0, 1, 2, 3, 13, 30):
                for j in range(2):
                    word = int(masks[kt, nt, lane, j])
                    for half in range(2):
                        n = 64 * nt + 16 * (2 * j + lane % 4 // 2) + lane // 4 + 8 * half
                        for four in range(4):
                            descriptor = word >> (16 * half + 4 * four) & 15
                            first, second = descriptor & 3, descriptor >> 2
                            assert first < second
                            k = 32 * kt + 16 * (lane % 2) + 4 * four
                            used = values[k : k + 4, n].nonzero().flatten().tolist()
                            assert set(used) <= {first, second}


def test_what_the_kernel_lacks_is_named() -> None:
    for q, message in (
        (random_sparse(96, 64, -1), "multiples of 64"),
        (random_sparse(64, 64, 32), "group sizes 64, 128, -1"),
    ):
        assert message in (sparse_refusal(q) or "")


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("granularity", GROUPS)
def test_every_batch_has_a_configuration_that_fits(device: Device, granularity: Granularity) -> None:
    for m in (1, 7, 16, 33, 64, 300, 4096):
        for n, k in ((64, 64), (4096, 4096), (28672, 8192)):
            chosen = choose(m, n, k, device, granularity)
            assert chosen in list(candidates(m, k, device, granularity))
            assert chosen.shared_bytes(granularity) <= device.shared_bytes
            assert chosen.tile_m >= min(m, 64)


@pytest.mark.parametrize("architecture", QUICK)
def test_no_variant_spills(architecture: str) -> None:
    """The variants of most registers: smallest groups, by rows of the batch."""
    for blocks_m in {1, configuration.largest_tile(Device(architecture, 1, 1).capability)}:
        found = SparseConfig(1, 2, blocks_m, 1, 3).instantiation(Granularity.group(64), bfloat16=True)
        compiled = compile_text(found.text(), found.function, architecture)
        assert compiled.spill_bytes == 0
        assert compiled.registers <= configuration.REGISTERS[blocks_m]


def test_a_cpu_computes_the_reference() -> None:
    q = random_sparse(128, 64, 64)
    x, bias = torch.randn(3, 128).half(), torch.randn(64).half()
    found = sparse_gemm(x, sparse_operand(q, torch.float16), bias)
    assert relative_error(found, expected(q, x, bias, torch.float16)) <= 2**-10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group_size", [64, 128, -1])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (576, 1536), (2112, 448), (64, 64)])
def test_products_on_a_gpu(k: int, n: int, group_size: int, dtype: torch.dtype) -> None:
    if group_size > 0 and k % group_size:
        pytest.skip("no whole groups")
    q = random_sparse(k, n, group_size)
    operand = sparse_operand(q.to(torch.device("cuda")), dtype)
    for m in (1, 2, 8, 9, 17, 33, 64, 65, 200):
        x = torch.randn(m, k, device="cuda").to(dtype)
        bias = torch.randn(n, device="cuda").to(dtype)
        found = sparse_gemm(x, operand, bias)
        wanted = expected(q.to(torch.device("cuda")), x, bias, dtype)
        assert relative_error(found, wanted) <= BOUND[dtype], m
        assert torch.equal(found, sparse_gemm(x, operand, bias)), "the same bits every time"


@pytest.mark.gpu
def test_every_candidate_on_a_gpu() -> None:
    from marlinq.kernels import device_numbers
    from marlinq.kernels.sparse.launch import launch, prepare

    q = random_sparse(1024, 512, 128).to(torch.device("cuda"))
    operand = sparse_operand(q, torch.float16)
    for m in (1, 13, 30, 64):
        x = torch.randn(m, 1024, device="cuda").half()
        wanted = expected(q, x, None, torch.float16)
        for config in candidates(m, 1024, device_numbers(0), q.granularity):
            out = torch.full((m, 512), torch.nan, device="cuda", dtype=torch.float16)
            launch(prepare(config, operand, x, None, out), 0)
            assert relative_error(out, wanted) <= BOUND[torch.float16], config
