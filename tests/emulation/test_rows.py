"""The stream kernel's work on rows on the emulation: residual stream behind a product, norm before one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from marlinq.kernels import Problem
from marlinq.kernels.decide.decision import estimates
from marlinq.kernels.decide.stream import StreamConfig
from marlinq.kernels.launch.operands import Operands
from marlinq.kernels.launch.rows import SQUARED_COLUMNS, Added, Normed, RowWork
from tests.emulation.build import Builder
from tests.emulation.gemm import ACTIVATIONS, H200, SOURCES, bound
from tests.emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from tests.kernels.problems import random_operands, relative_error

EPS, UNIT, FACTOR = 0.25, 4.0, 0.5


@dataclass(frozen=True)
class Given:
    """Operands of a launch, on memory of their own."""

    operands: Operands
    weight: Tensor

    def memory(self, **more: Memory) -> list[Memory]:
        named = self.operands._asdict()
        return [
            Memory(name, tensor, writable=name == "out", after_previous=name in ("x", "out"))
            for name, tensor in named.items()
            if tensor is not None
        ] + list(more.values())


def given(problem: Problem) -> Given:
    torch.manual_seed(problem.n)
    dtype = torch.bfloat16 if problem.bfloat16 else torch.float16
    made = random_operands(
        problem.k, problem.n, problem.group_size, dtype, zeros=problem.zeros, bias=True, device="cpu"
    )
    assert made.bias is not None
    columns = problem.n if problem.activation is None else problem.n // 2
    operands = Operands(
        apart(torch.randn(problem.m, problem.k).to(dtype)),
        apart(made.words),
        apart(made.scales),
        None if made.zeros is None else apart(made.zeros),
        apart(made.bias),
        apart(torch.full((problem.m, columns), torch.nan, dtype=dtype)),
    )
    return Given(operands, made.weight)


def config(problem: Problem, *, tile_n: int, cluster: int, parts: int) -> StreamConfig:
    """The fastest variant with this tile and split."""
    found = [
        candidate
        for _, _, candidate in sorted(estimates(problem, H200, "stream"), key=lambda one: one[0])
        if isinstance(candidate, StreamConfig)
    ]
    return replace(
        next(one for one in found if (one.tile_n, one.parts // one.cluster) == (tile_n, parts)),
        cluster=cluster,
    )


def launch(
    builder: Builder,
    problem: Problem,
    variant: StreamConfig,
    operands: Operands,
    work: RowWork,
    memory: list[Memory],
    sources: Path = SOURCES,
) -> None:
    instantiation = work.instantiation(variant.instantiation(problem))
    library = builder.kernel(instantiation.text(), instantiation.function, sources, 90)
    EmulatedKernel(library).launch(
        variant.grid(problem),
        variant.threads,
        variant.shared_bytes(problem),
        work.arguments(operands.plain_arguments(dependent=True)),
        memory,
        dependent=True,
        seed=problem.m,
    )


# (M, N, K, bfloat16, tile, blocks of a cluster, parts of a block)
SUMS = [
    (1, 192, 512, False, 64, 1, 4),
    (3, 192, 768, False, 64, 2, 4),
    (4, 320, 512, True, 128, 1, 2),
    (8, 192, 1024, False, 128, 3, 2),
    (11, 192, 512, False, 64, 2, 4),
]


@pytest.mark.parametrize(("m", "n", "k", "bfloat16", "tile", "cluster", "parts"), SUMS)
def test_results_go_to_the_residual_stream(
    builder: Builder, m: int, n: int, k: int, bfloat16: bool, tile: int, cluster: int, parts: int
) -> None:
    problem = Problem(m, n, k, 128, False, bfloat16)
    made = given(problem)
    operands = made.operands
    dtype = operands.out.dtype
    residual = apart(torch.randn(m, n + 8).to(dtype)[:, :n])
    stored = apart(torch.full((m, n + 8), torch.nan, dtype=dtype)[:, :n])
    weight = apart(torch.rand(n))
    squares = apart(torch.full((m, n // SQUARED_COLUMNS), torch.nan))
    work = RowWork(added=Added(residual, weight, stored, squares, FACTOR))
    memory = made.memory(
        residual=Memory("residual", residual, after_previous=True),
        weight=Memory("weight", weight),
        stored=Memory("stored", stored, writable=True, after_previous=True),
        squares=Memory("squares", squares, writable=True, after_previous=True),
    )
    launch(
        builder, problem, config(problem, tile_n=tile, cluster=cluster, parts=parts), operands, work, memory
    )
    assert operands.bias is not None
    product = operands.x.double() @ made.weight + operands.bias.double()
    assert relative_error(stored, residual.double() + FACTOR * product) < bound(problem)
    # What follows is exact but for float32 and one rounding.
    kept = stored.double()
    assert relative_error(operands.out, kept * weight.double()) < bound(problem)
    expected = kept.square().view(m, -1, SQUARED_COLUMNS).sum(-1)
    assert float(((squares.double() - expected) / expected).abs().max()) < 1e-6


# (M, N, K, bfloat16, activation, tile, blocks of a cluster, parts of a block)
NORMED = [
    (1, 192, 512, False, None, 64, 2, 4),
    (3, 192, 1024, False, None, 64, 1, 8),
    (4, 256, 512, True, "silu", 128, 1, 2),
    (8, 256, 4096, False, "gelu", 128, 2, 2),
    (11, 192, 512, False, None, 64, 1, 4),
]


@pytest.mark.parametrize(("m", "n", "k", "bfloat16", "activation", "tile", "cluster", "parts"), NORMED)
def test_activations_are_normalised_behind_the_product(
    builder: Builder,
    m: int,
    n: int,
    k: int,
    bfloat16: bool,
    activation: str | None,
    tile: int,
    cluster: int,
    parts: int,
) -> None:
    problem = Problem(m, n, k, 128, False, bfloat16, activation=activation)
    made = given(problem)
    operands = made.operands
    squares = apart(torch.rand(m, k // SQUARED_COLUMNS) * 100)
    work = RowWork(normed=Normed(squares, k, EPS, UNIT))
    memory = made.memory(squares=Memory("squares", squares, after_previous=True))
    launch(
        builder, problem, config(problem, tile_n=tile, cluster=cluster, parts=parts), operands, work, memory
    )
    assert operands.bias is not None
    factor = UNIT * torch.rsqrt(squares.double().sum(1, keepdim=True) / k + EPS)
    expected = operands.x.double() * factor @ made.weight + operands.bias.double()
    if activation is not None:
        gate, up = expected.view(m, -1, 2, 64).unbind(2)
        expected = (cast(Callable[[Tensor], Tensor], ACTIVATIONS[activation])(gate) * up).flatten(1)
    assert relative_error(operands.out, expected) < bound(problem)


def test_squares_are_not_read_before_the_previous_kernel_has_ended(builder: Builder, tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    sources.mkdir()
    for path in SOURCES.rglob("*.cuh"):
        target = sources / path.relative_to(SOURCES)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        if path.name == "stream.cuh":
            text = text.replace("        begin(m0, n0, rank, rows_m);\n", "")
            text = text.replace(
                "        if (dependent) {\n",
                "        begin(m0, n0, rank, rows_m);\n        if (dependent) {\n",
            )
            assert text.count("begin(m0, n0, rank, rows_m);") == 1
        target.write_text(text)
    problem = Problem(3, 192, 1024, 128, False, False)
    made = given(problem)
    squares = apart(torch.rand(3, 16))
    work = RowWork(normed=Normed(squares, 1024, EPS, UNIT))
    memory = made.memory(squares=Memory("squares", squares, after_previous=True))
    with pytest.raises(KernelFault, match="squares"):
        launch(
            builder,
            problem,
            config(problem, tile_n=64, cluster=1, parts=8),
            made.operands,
            work,
            memory,
            sources,
        )
