"""The sparse kernel on the emulation against float64, and with faults planted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from marlinq.kernels.contract.instantiation import CUDA_SOURCES
from marlinq.kernels.sparse import SparseConfig, sparse_operand
from marlinq.kernels.sparse.launch import prepare
from tests.kernels.problems import relative_error
from tests.kernels.sparse_problems import expected, random_sparse


@dataclass(frozen=True)
class Case:
    """A launch: batch rows, shape, group size, configuration, dtype."""

    m: int
    n: int
    k: int
    group_size: int
    config: SparseConfig
    dtype: torch.dtype = torch.float16
    dependent: bool = False
    bias: bool = True
    capability: int = 90


def run(builder: Builder, case: Case, planted: Planted | None = None, seed: int = 0) -> float:
    """The relative error of the result; NaN where an element was not written."""
    q = random_sparse(case.k, case.n, case.group_size)
    operand = sparse_operand(q, case.dtype)
    operand = replace(
        operand, words=apart(operand.words), masks=apart(operand.masks), scales=apart(operand.scales)
    )
    generator = torch.Generator().manual_seed(1)
    x = apart(torch.randn(case.m, case.k, generator=generator).to(case.dtype))
    bias = apart(torch.randn(case.n, generator=generator).to(case.dtype)) if case.bias else None
    out = apart(torch.full((case.m, case.n), torch.nan, dtype=case.dtype))
    prepared = prepare(case.config, operand, x, bias, out, case.dependent)
    library = builder.kernel(
        prepared.instantiation.text(), prepared.instantiation.function, CUDA_SOURCES, case.capability, planted
    )
    memory = [
        Memory("x", x, after_previous=True),
        Memory("words", operand.words),
        Memory("masks", operand.masks),
        Memory("scales", operand.scales),
        Memory("out", out, writable=True, after_previous=True),
    ]
    if bias is not None:
        memory.append(Memory("bias", bias))
    EmulatedKernel(library).launch(
        prepared.grid,
        prepared.threads,
        prepared.shared_bytes,
        prepared.arguments,
        memory,
        dependent=case.dependent,
        seed=seed,
    )
    return relative_error(out, expected(q, x, bias, case.dtype))


CASES = {
    "one row, groups of 64, a short last chunk": Case(1, 64, 192, 64, SparseConfig(1, 2, 1, 1, 3)),
    "two warps side by side, columns that end in a tile": Case(5, 192, 256, 128, SparseConfig(2, 1, 1, 1, 3)),
    "whole channels, a cluster, parts without a chunk": Case(
        9, 64, 320, -1, SparseConfig(1, 2, 2, 2, 3), torch.bfloat16
    ),
    "scaled weights, two tiles of rows": Case(70, 64, 128, 64, SparseConfig(1, 1, 8, 1, 3), bias=False),
    "before compute capability 9.0": Case(20, 64, 256, 128, SparseConfig(1, 2, 4, 1, 3), capability=80),
    "a dependent launch": Case(3, 128, 640, 128, SparseConfig(1, 2, 1, 1, 3), dependent=True),
}


def bound(case: Case) -> float:
    """Rounding of the result; of weights, too, where scales multiply them."""
    ulp = 2**-11 if case.dtype == torch.float16 else 2**-8
    return ulp * (1 if case.config.tile_m <= 32 else 2)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_float64(builder: Builder, name: str) -> None:
    assert run(builder, CASES[name]) <= bound(CASES[name])


FAULTS = {
    "sparse_mask_of_block": (
        Planted("sparse_mask_of_block", "masks.x"),
        "one row, groups of 64, a short last chunk",
    ),
    "sparse_selector": (Planted("sparse_selector", "0"), "one row, groups of 64, a short last chunk"),
    "sparse_columns": (
        Planted("sparse_columns", "n0 / 64 + wn"),
        "two warps side by side, columns that end in a tile",
    ),
    "sparse_mask_rows": (Planted("sparse_mask_rows", "i"), "one row, groups of 64, a short last chunk"),
    "sparse_groups": (Planted("sparse_groups", "group"), "one row, groups of 64, a short last chunk"),
    "sparse_waits": (Planted("sparse_waits", ""), "a dependent launch"),
    "sparse_copies_waited": (Planted("sparse_copies_waited", "STAGES - 1"), "a dependent launch"),
    "sparse_warp_met": (Planted("sparse_warp_met", ";"), "a dependent launch"),
    "sparse_neighbours_met": (
        Planted("sparse_neighbours_met", ";"),
        "two warps side by side, columns that end in a tile",
    ),
    "sparse_ring_drained": (Planted("sparse_ring_drained", ""), "a dependent launch"),
}


@pytest.mark.parametrize("site", FAULTS)
def test_planted_faults_are_found(builder: Builder, site: str) -> None:
    planted, name = FAULTS[site]
    for seed in range(4):
        try:
            error = run(builder, CASES[name], planted, seed)
        except KernelFault:
            return
        if not error <= bound(CASES[name]):
            return
    raise AssertionError(f"{site}: not found in four schedules")
