"""Weights of other elements than 4-bit integers on a GPU, by all kernels, ways of scaling and launches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels import (
    GEMMS,
    KERNELS,
    Problem,
    dependent_launches,
    device_numbers,
    forced_kernel,
    precompile,
)
from marlinq.kernels.choose.decision import available
from marlinq.kernels.contract.product_tensors import ProductTensors as Tensors
from marlinq.kernels.contract.weight_formats import INT4_SPARSE, WEIGHT_FORMATS, WeightFormat
from marlinq.kernels.launch.call import launch_gemm
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.kernels.problems import BOUND, random_operands, relative_error

pytestmark = pytest.mark.gpu

FORMATS = [each for name, each in WEIGHT_FORMATS.items() if each.codec is not None and name != "int4"]
BATCHES = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 200, 260, 777, 2048)
# K = 128: parts of one short chunk.
SHAPES = ((128, 320), (1536, 576), (2112, 448), (4096, 1024))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [16, 32, 64, 128, -1])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda each: each.name)
def test_every_batch(weight_format: WeightFormat, kernel: str, group: int, dtype: torch.dtype) -> None:
    if kernel not in available(device_numbers(0)):
        pytest.skip(f"the {kernel} kernel needs another GPU than {device_numbers(0).architecture}")
    if 0 < group < weight_format.smallest_group:
        pytest.skip(f"{weight_format.name} has groups of {weight_format.smallest_group} at least")
    multiple = math.lcm(weight_format.channel_multiple, max(group, 1))
    # The operator takes a group as long as K for a single one.
    shapes = [shape for shape in SHAPES if shape[0] % multiple == 0 and shape[0] != group]
    granularity = Granularity.from_group_size(group)
    kinds = (False, True) if weight_format.stores_zeros else (False,)
    with forced_kernel(kernel):
        precompile(
            Problem(m, n, k, granularity, zeros, dtype == torch.bfloat16, weight_format)
            for (k, n), zeros, m in itertools.product(shapes, kinds, BATCHES)
        )
    wrong = {}
    for (k, n), zeros in itertools.product(shapes, kinds):
        made = random_operands(k, n, group, dtype, zeros=zeros, bias=True, weight_format=weight_format)
        x = torch.randn(max(BATCHES), k, device="cuda").to(dtype)
        expected = made.reference(x)
        for m in BATCHES:
            out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
            with forced_kernel(kernel):
                launch_gemm(Tensors(x[:m], made.operand, made.bias, out))
            error = relative_error(out, expected[:m])
            if not error < BOUND[dtype]:
                wrong[k, n, zeros, m] = error
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [128, 384])
def test_sparse_places_stay_until_products_are_done(k: int, dtype: torch.dtype) -> None:
    """In this variant, rarely chosen, ptxas (CUDA 13.0) reused the register of the last product's places."""
    if "warpgroup" not in available(device_numbers(0)):
        pytest.skip(f"the warpgroup kernel needs another GPU than {device_numbers(0).architecture}")
    made = random_operands(k, 4096, -1, dtype, weight_format=INT4_SPARSE)
    x = torch.randn(20, k, device="cuda").to(dtype)
    out = torch.full((20, 4096), float("nan"), dtype=dtype, device="cuda")
    launch_gemm(Tensors(x, made.operand, None, out), WarpgroupConfig(32, 1, 1, 2, 4, 1, 12, 1, 132))
    assert relative_error(out, made.reference(x)) < BOUND[dtype]


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda each: each.name)
def test_the_operator_in_a_captured_chain(weight_format: WeightFormat) -> None:
    made = random_operands(1024, 1024, 128, torch.float16, weight_format=weight_format)
    gemm = GEMMS[weight_format.name]
    given = made.words, made.scales, None, None, made.group_size, 1024
    for m in (1, 16, 64):
        x = torch.randn(m, 1024, device="cuda").half()
        with dependent_launches():
            gemm(gemm(x, *given), *given)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                first = gemm(x, *given)
                second = gemm(first, *given)
        for _ in range(2):
            first.fill_(float("nan"))
            second.fill_(float("nan"))
            graph.replay()
        assert relative_error(first, made.reference(x)) < BOUND[torch.float16]
        assert relative_error(second, made.reference(first)) < BOUND[torch.float16]
