"""A token of latent attention on the emulation: absorbed queries, attention in splits, and their sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, Memory, apart
from marlinq.kernels.step import (
    LatentDivision,
    LatentWeights,
    LatentWorkspace,
    RowNorm,
    latent_attend,
    latent_queries,
    latent_values,
)
from tests.emulation.step import DTYPES, constants, given, poisoned, results, row_norm, start, strided
from tests.kernels.step_problems import (
    BOUND,
    expected_latent,
    expected_latent_queries,
    expected_latent_rows,
    random,
    relative_error,
    rotation_table,
)
from tests.testing.pairs import in_turn

SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """Sizes of a layer, and lengths of the rows; ``together``: the rows are tokens of one sequence."""

    heads: int
    plain: int
    value: int
    latent: int
    rotated: int
    norm: Literal["RMS", "RMS_WIDE"]
    lengths: tuple[int, ...]
    division: LatentDivision
    interleaved: bool = True
    together: bool = False


# Rows of one split and of three, which two warps add, the last of them not full; heads in two blocks.
# Neighbouring tokens in two groups of rows, whose new rows begin inside a tile of the ring.
CASES = [
    Case(11, 32, 32, 128, 32, "RMS", (0, 9, 77), LatentDivision(3, 8, 16, 2)),
    Case(3, 64, 64, 128, 64, "RMS_WIDE", tuple(range(90, 99)), LatentDivision(1, 8, 32, 3), False, True),
]


class Layer:
    """Random weights and tensors of a case."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        torch.manual_seed(case.heads)
        rows, width, capacity = len(case.lengths), case.latent + case.rotated, max(case.lengths) + 1
        norm: RowNorm = row_norm(case.norm, case.latent, dtype)
        self.weights = LatentWeights(
            keys=apart(random(case.heads, case.latent, case.plain, dtype=dtype, size=case.plain**-0.5)),
            values=apart(random(case.heads, case.value, case.latent, dtype=dtype, size=case.latent**-0.5)),
            norm=norm,
            table=apart(rotation_table(capacity, case.rotated)),
            interleaved=case.interleaved,
        )
        columns = case.heads * (case.plain + case.rotated)
        self.q = strided(rows, columns, columns + 8, dtype)
        self.latent = strided(rows, width, width + 16, dtype)
        self.cache = apart(random(1 if case.together else rows, capacity, width, dtype=dtype))
        self.lengths = apart(torch.tensor(case.lengths, dtype=torch.int32))
        self.queries = poisoned(rows, case.heads, width, dtype=dtype)
        self.out = poisoned(rows, case.heads * case.value, dtype=dtype)
        workspace = LatentWorkspace.of(rows, [(self.weights, case.division)], dtype)
        assert workspace is not None
        self.workspace = workspace._replace(
            sums=poisoned(workspace.sums.numel(), dtype=torch.float32),
            totals=poisoned(workspace.totals.numel(), dtype=torch.float32),
        )
        self.case = case

    def run_queries(self, builder: Builder, planted: Planted | None = None) -> None:
        weights = self.weights
        prepared = latent_queries(self.q, self.latent, self.cache, self.lengths, weights, self.queries)
        memory = [
            *given(q=self.q, latent=self.latent),
            *constants(
                lengths=self.lengths, keys=weights.keys, norm=weights.norm.weight, table=weights.table
            ),
            *results(cache=self.cache, queries=self.queries),
        ]
        start(builder, prepared, memory, planted=planted)

    def run_attention(self, builder: Builder, planted: Planted | None = None) -> None:
        prepared = latent_attend(
            *(self.queries, self.cache, self.lengths, self.weights, self.workspace),
            scale=SCALE,
            division=self.case.division,
        )
        # Rows that the queries' kernel appends are not there before it has ended, and none lies behind them.
        old = self.case.lengths[:1] if self.case.together else self.case.lengths
        ends = [max(self.case.lengths) + 1] if self.case.together else [length + 1 for length in old]
        rows: list[Memory] = []
        for sequence, (length, end) in enumerate(zip(old, ends, strict=True)):
            if length:
                rows += constants(**{f"old rows of {sequence}": self.cache[sequence, :length]})
            rows += given(**{f"new rows of {sequence}": self.cache[sequence, length:end]})
        memory = [
            *rows,
            *given(queries=self.queries),
            *constants(lengths=self.lengths),
            *results(sums=self.workspace.sums, totals=self.workspace.totals),
        ]
        start(builder, prepared, memory, planted=planted)

    def run_values(self, builder: Builder, planted: Planted | None = None) -> None:
        prepared = latent_values(
            *(self.out, self.lengths, self.weights, self.workspace),
            capacity=self.cache.shape[1],
            division=self.case.division,
        )
        memory = [
            *given(sums=self.workspace.sums, totals=self.workspace.totals),
            *constants(lengths=self.lengths, values=self.weights.values),
            *results(out=self.out),
        ]
        start(builder, prepared, memory, planted=planted)


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, DTYPES), ids=str)
def test_a_token_of_latent_attention(builder: Builder, case: Case, dtype: torch.dtype) -> None:
    layer = Layer(case, dtype)
    before = layer.cache.clone()
    layer.run_queries(builder)
    queries = expected_latent_queries(layer.q, layer.lengths, layer.weights)
    assert relative_error(layer.queries, queries) < BOUND[dtype]
    rows = (
        torch.zeros(len(case.lengths), dtype=torch.int64)
        if case.together
        else torch.arange(len(case.lengths))
    )
    new = expected_latent_rows(layer.latent, layer.lengths, layer.weights)
    assert relative_error(layer.cache[rows, layer.lengths.long()], new) < BOUND[dtype]
    before[rows, layer.lengths.long()] = layer.cache[rows, layer.lengths.long()]
    assert torch.equal(layer.cache, before)
    layer.run_attention(builder)
    layer.run_values(builder)
    # Probabilities, sums of latents and results are rounded.
    found = relative_error(
        layer.out, expected_latent(layer.queries, layer.cache, layer.lengths, layer.weights, SCALE)
    )
    assert found < 1.5 * BOUND[dtype]


FAULTS = {
    "latent_queries_wait": ("queries", Planted("latent_queries_wait")),
    "latent_sums_there": ("queries", Planted("latent_sums_there")),
    "latent_attend_waits": ("attention", Planted("latent_attend_waits")),
    "latent_old_rows": ("attention", Planted("latent_old_rows", "span.last")),
    "latent_tile_there": ("attention", Planted("latent_tile_there")),
    "latent_scores_there": ("attention", Planted("latent_scores_there")),
    "latent_powers_there": ("attention", Planted("latent_powers_there")),
    "latent_values_wait": ("values", Planted("latent_values_wait")),
    "latent_parts_there": ("values", Planted("latent_parts_there")),
    "latent_merged_there": ("values", Planted("latent_merged_there")),
}


UNMASKED = Planted("latent_mask", "true")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(builder: Builder, fault: str) -> None:
    kernel, planted = FAULTS[fault]
    layer = Layer(CASES[0], torch.float16)
    runs = {"queries": layer.run_queries, "attention": layer.run_attention, "values": layer.run_values}
    for name, run in runs.items():
        if name != kernel:
            _fill(layer, name)
            continue
        with pytest.raises(
            KernelFault, match=r"griddepcontrol\.wait|without waiting for it|still be reading|race"
        ):
            run(builder, planted)
        return


def _fill(layer: Layer, kernel: str) -> None:
    """Numbers in the place of what an earlier kernel would have left."""
    left: dict[str, tuple[Tensor, ...]] = {
        "queries": (layer.queries,),
        "attention": (layer.workspace.sums, layer.workspace.totals),
    }
    for tensor in left.get(kernel, ()):
        tensor.fill_(1.0)


def test_positions_behind_the_last_one_are_masked(builder: Builder) -> None:
    layer = Layer(CASES[0], torch.float16)
    layer.queries.copy_(random(*layer.queries.shape, dtype=torch.float16))
    layer.run_attention(builder, UNMASKED)
    layer.run_values(builder)
    expected = expected_latent(layer.queries, layer.cache, layer.lengths, layer.weights, SCALE)
    assert relative_error(layer.out, expected) > 0.1
