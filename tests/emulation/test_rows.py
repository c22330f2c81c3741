"""Products' work on rows on the emulation: residual stream behind a product, norm before one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from marlinq.kernels import Problem
from marlinq.kernels.choose.decision import estimates
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import INT4_SPARSE
from marlinq.kernels.contract.whole_rows import Added, Normed, RowWork
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.emulation.faults import WRONG
from tests.emulation.gemm import ACTIVATIONS, H200, SOURCES, apart_operand, bound, memory_of
from tests.emulation.tensor_maps import emulated_tensor_maps
from tests.kernels.problems import int4_problem, random_operands, relative_error

EPS, UNIT, FACTOR = 0.25, 4.0, 0.5
Choice = Callable[[Problem], Configuration]


@dataclass(frozen=True)
class Given:
    """Operands of a launch, on memory of their own."""

    operands: ProductTensors
    weight: Tensor

    def memory(self, **more: Memory) -> list[Memory]:
        return memory_of(self.operands) + list(more.values())


def given(problem: Problem) -> Given:
    torch.manual_seed(problem.n)
    dtype = torch.bfloat16 if problem.bfloat16 else torch.float16
    made = random_operands(
        problem.k,
        problem.n,
        problem.granularity.group_size,
        dtype,
        zeros=problem.zeros,
        bias=True,
        device="cpu",
        weight_format=problem.format,
    )
    assert made.bias is not None
    columns = problem.n if problem.activation is None else problem.n // 2
    operands = ProductTensors(
        apart(torch.randn(problem.m, problem.k).to(dtype)),
        apart_operand(made.operand),
        apart(made.bias),
        apart(torch.full((problem.m, columns), torch.nan, dtype=dtype)),
    )
    return Given(operands, made.weight)


def config(problem: Problem, *, tile_n: int, cluster: int, parts: int) -> StreamConfig:
    """The fastest variant with this tile and split, in tiles of eight rows, which alone have work on rows."""
    found = [
        candidate
        for _, _, candidate in sorted(estimates(problem, H200, "stream"), key=lambda one: one[0])
        if isinstance(candidate, StreamConfig)
    ]
    return replace(
        next(one for one in found if (one.tile_n, one.parts // one.cluster) == (tile_n, parts)),
        cluster=cluster,
        blocks_m=1,
    )


def launch(
    builder: Builder,
    problem: Problem,
    variant: Configuration,
    operands: ProductTensors,
    work: RowWork,
    memory: list[Memory],
    planted: Planted | None = None,
) -> None:
    found = variant.row_variant(problem, normed=work.normed is not None, adds=work.added is not None)
    assert found is not None
    library = builder.kernel(found.instantiation.text(), found.instantiation.function, SOURCES, 90, planted)
    with emulated_tensor_maps():
        plain = variant.arguments(operands, dependent=True)
    EmulatedKernel(library).launch(
        variant.grid(problem),
        variant.threads,
        variant.shared_bytes(problem),
        work.arguments(found.arguments, plain),
        memory,
        registers=variant.launch_registers if isinstance(variant, WarpgroupConfig) else 255,
        dependent=True,
        seed=problem.m,
    )


def streaming(tile_n: int, cluster: int, parts: int) -> Choice:
    return lambda problem: config(problem, tile_n=tile_n, cluster=cluster, parts=parts)


def fixed(chosen: Configuration) -> Choice:
    return lambda _: chosen


# Sums that are pushed, of warps with one word and two a lane, and sums that meet in a block and in a cluster.
PUSHED = fixed(WarpgroupConfig(16, 1, 1, 3, 8, 2, 6, 1, 132))
PUSHED_WIDELY = fixed(WarpgroupConfig(16, 2, 1, 2, 8, 3, 4, 1, 132))
MEETING = fixed(WarpgroupConfig(16, 2, 1, 2, 8, 1, 4, 1, 132))
PULLED = fixed(WarpgroupConfig(48, 1, 1, 2, 8, 2, 4, 1, 132))
BULK = fixed(BulkConfig(1, 4, 2, 8, 2, 8, 1))

# (M, N, K, bfloat16, variant)
SUMS = [
    (1, 192, 512, False, streaming(64, 1, 4)),
    (3, 192, 768, False, streaming(64, 2, 4)),
    (4, 320, 512, True, streaming(128, 1, 2)),
    (8, 192, 1024, False, streaming(128, 3, 2)),
    (11, 192, 512, False, streaming(64, 2, 4)),
    (11, 192, 1024, False, PUSHED),
    (16, 320, 1024, True, PUSHED_WIDELY),
    # Two tiles of the batch, the second with five rows.
    (21, 192, 1024, False, PUSHED),
    (13, 320, 512, False, MEETING),
    (40, 192, 1024, False, PULLED),
    (9, 192, 1024, False, BULK),
    (21, 128, 1024, True, BULK),
]


@pytest.mark.parametrize(("m", "n", "k", "bfloat16", "choose"), SUMS)
def test_results_go_to_the_residual_stream(
    builder: Builder, m: int, n: int, k: int, bfloat16: bool, choose: Choice
) -> None:
    problem = int4_problem(m, n, k, 128, False, bfloat16)
    adds(builder, problem, choose(problem))


def adds(
    builder: Builder, problem: Problem, variant: Configuration, _: int = 0, planted: Planted | None = None
) -> None:
    """Compare a product that adds to the residual stream with float64."""
    m, n = problem.m, problem.n
    made = given(problem)
    operands = made.operands
    dtype = operands.out.dtype
    residual = apart(torch.randn(m, n + 8).to(dtype)[:, :n])
    stored = apart(torch.full((m, n + 8), torch.nan, dtype=dtype)[:, :n])
    weight = apart(torch.rand(n))
    found = variant.row_variant(problem, normed=False, adds=True)
    assert found is not None
    squares = apart(torch.full((m, n // found.squared_columns), torch.nan))
    work = RowWork(added=Added(residual, weight, stored, squares, FACTOR))
    memory = made.memory(
        residual=Memory("residual", residual, after_previous=True),
        weight=Memory("weight", weight),
        stored=Memory("stored", stored, writable=True, after_previous=True),
        squares=Memory("squares", squares, writable=True, after_previous=True),
    )
    launch(builder, problem, variant, operands, work, memory, planted)
    assert operands.bias is not None
    product = operands.x.double() @ made.weight + operands.bias.double()
    assert relative_error(stored, residual.double() + FACTOR * product) < bound(problem)
    # The following values are exact but for float32 and one rounding.
    kept = stored.double()
    assert relative_error(operands.out, kept * weight.double()) < bound(problem)
    expected = kept.square().view(m, -1, found.squared_columns).sum(-1)
    assert float(((squares.double() - expected) / expected).abs().max()) < 1e-6


# (M, N, K, bfloat16, activation, columns that were squared together, variant)
NORMED = [
    (1, 192, 512, False, None, 64, streaming(64, 2, 4)),
    (3, 192, 1024, False, None, 64, streaming(64, 1, 8)),
    (4, 256, 512, True, "silu", 64, streaming(128, 1, 2)),
    (8, 256, 4096, False, "gelu", 16, streaming(128, 2, 2)),
    (11, 192, 512, False, None, 64, streaming(64, 1, 4)),
    (11, 192, 1024, False, None, 16, PUSHED),
    (16, 320, 4096, True, None, 16, PUSHED_WIDELY),
    (21, 192, 1024, False, None, 64, PUSHED),
    (13, 256, 1024, False, "silu", 16, MEETING),
    (40, 192, 1024, False, None, 16, PULLED),
    (9, 256, 512, True, "gelu", 64, fixed(WarpgroupConfig(16, 2, 1, 1, 8, 1, 4, 1, 132))),
]


@pytest.mark.parametrize(("m", "n", "k", "bfloat16", "activation", "squared", "choose"), NORMED)
def test_activations_are_normalised_behind_the_product(
    builder: Builder,
    m: int,
    n: int,
    k: int,
    bfloat16: bool,
    activation: str | None,
    squared: int,
    choose: Choice,
) -> None:
    problem = int4_problem(m, n, k, 128, False, bfloat16, activation=activation)
    normalises(builder, problem, choose(problem), squared)


@pytest.mark.parametrize("choose", [streaming(64, 2, 4), pytest.param(PUSHED, marks=pytest.mark.slow)])
def test_products_with_sparse_weights_work_on_rows_too(builder: Builder, choose: Choice) -> None:
    problem = int4_problem(7, 192, 1024, 128, False, False, INT4_SPARSE)
    adds(builder, problem, choose(problem))
    normalises(builder, problem, choose(problem), 16)


def normalises(
    builder: Builder, problem: Problem, variant: Configuration, squared: int, planted: Planted | None = None
) -> None:
    """Compare a product whose activations lack their norm with float64; ``squared`` columns a sum."""
    m, k, activation = problem.m, problem.k, problem.activation
    made = given(problem)
    operands = made.operands
    squares = apart(torch.rand(m, k // squared) * 100 * squared / 64)
    work = RowWork(normed=Normed(squares, k, EPS, UNIT))
    memory = made.memory(squares=Memory("squares", squares, after_previous=True))
    launch(builder, problem, variant, operands, work, memory, planted)
    assert operands.bias is not None
    factor = UNIT * torch.rsqrt(squares.double().sum(1, keepdim=True) / k + EPS)
    expected = operands.x.double() * factor @ made.weight + operands.bias.double()
    if activation is not None:
        gate, up = expected.view(m, -1, 2, 64).unbind(2)
        expected = (cast(Callable[[Tensor], Tensor], ACTIVATIONS[activation])(gate) * up).flatten(1)
    assert relative_error(operands.out, expected) < bound(problem)


# Name of the fault: variant, True if activations are normalised (else results are added), fault, report.
FAULTS = {
    "squares read before the wait": (
        streaming(64, 1, 8),
        True,
        Planted("stream_waits", "begin(m0, n0, rank, rows_m); wait_for_previous_kernel();"),
        "touches squares without waiting",
    ),
    "squares read by others before the wait": (
        PUSHED,
        True,
        Planted("squares_wait"),
        "touches squares without waiting",
    ),
    "pushed sums scaled before factors are there": (
        PUSHED,
        True,
        Planted("pushed_factors"),
        "without waiting for it",
    ),
    "sums that met scaled before factors are there": (
        MEETING,
        True,
        Planted("met_factors"),
        "without waiting for it",
    ),
    "a warp's factors forgotten": (
        PUSHED,
        True,
        Planted("factor_warps", "2"),
        "without waiting for it|all the phase's arrivals",
    ),
    "the residual stream read before the wait": (
        PUSHED,
        False,
        Planted("residual_waits"),
        "touches residual without waiting",
    ),
    "the bulk kernel's residual stream read before the wait": (
        BULK,
        False,
        Planted("bulk_residual_waits"),
        "touches residual without waiting",
    ),
    "another block's columns requested": (PUSHED, False, Planted("requested_columns", "slot"), WRONG),
    "rows of a lane exchanged": (
        BULK,
        False,
        Planted(
            "residual_of_row",
            "addend.residual[0] = addend.residual[0] >> 16 | addend.residual[0] << 16; return addend;",
        ),
        WRONG,
    ),
    "squares of half the columns": (PUSHED, False, Planted("squares_of_columns", "distance > 4"), WRONG),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(builder: Builder, name: str) -> None:
    choose, normed, planted, reported = FAULTS[name]
    check = normalises if normed else adds
    problem = int4_problem(11, 256, 1024, 128, False, False)
    with pytest.raises((KernelFault, AssertionError)) as caught:
        check(builder, problem, choose(problem), 16, planted)
    found = str(caught.value) if isinstance(caught.value, KernelFault) else WRONG
    assert re.search(reported, found), found
