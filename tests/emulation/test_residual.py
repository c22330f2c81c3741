"""The kernel of the residual stream on the emulation: addends, norms, embeddings, rows of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, Memory, apart
from marlinq.kernels.step import Gather, RoutedRows, RowNorm, residual
from tests.emulation.step import (
    DTYPES,
    constants,
    given,
    poisoned,
    results,
    row_norm,
    start,
    strided,
    weights_of,
)
from tests.kernels.step_problems import BOUND, expected_norm, random, relative_error
from tests.testing.pairs import in_turn

# (width, kind, post, addends, bias)
ROWS = [
    (64, "RMS", None, 1, False),
    (576, "RMS", None, 0, False),
    (264, "RMS_WIDE", "RMS_WIDE", 1, False),
    (72, "LAYER", None, 2, True),
    (4352, "LAYER", "RMS", 1, True),
    (128, None, "LAYER", 1, False),
    (8200, "RMS", None, 2, False),
]


@pytest.mark.parametrize(("row", "dtype"), in_turn(ROWS, DTYPES))
def test_residual_stream_and_norm(
    builder: Builder, row: tuple[int, str | None, str | None, int, bool], dtype: torch.dtype
) -> None:
    width, kind, post, addends, bias = row
    torch.manual_seed(width)
    m = 3
    x = strided(m, width, width + 8, dtype)
    added = [strided(m, width, width + 64, dtype) for _ in range(addends)]
    norm = row_norm(kind, width, dtype, bias=bias) if kind else None
    post_norm = row_norm(post, width, dtype) if post else None
    stored = strided(m, width, width + 8, dtype).fill_(torch.nan) if addends else None
    out = poisoned(m, width, dtype=dtype) if kind else None
    prepared = residual(
        x,
        stored=stored,
        out=out,
        norm=norm,
        first=added[0] if added else None,
        second=added[1] if addends > 1 else None,
        post=post_norm,
        factor=0.25,
        scale=1.5 if addends else 1.0,
    )
    memory = [
        *given(residual=x, first=added[0] if added else None, second=added[1] if addends > 1 else None),
        *results(stored=stored, out=out),
        *weights_of("norm's", norm),
        *weights_of("post-norm's", post_norm),
    ]
    start(builder, prepared, memory, seed=width)
    total = x.double()
    if added:
        addend = torch.stack([each.double() for each in added]).sum(0)
        total = total + 0.25 * (expected_norm(addend, post_norm) if post_norm else addend)
    if stored is not None:
        total = 1.5 * total
        assert relative_error(stored, total) < BOUND[dtype]
    if out is not None and norm is not None:
        # The norm is of the rounded sum.
        of = total if stored is None else stored.double()
        assert relative_error(out, expected_norm(of, norm)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens_each", [1, 3])
@pytest.mark.parametrize("learned", [False, True])
def test_embeddings(builder: Builder, learned: bool, tokens_each: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens_each)
    width, batch = 136, 2
    m = batch * tokens_each
    tokens = apart(torch.randint(0, 11, (m,)))
    table = apart(random(11, width, dtype=dtype))
    positions = apart(random(20, width, dtype=dtype)) if learned else None
    lengths = apart(torch.tensor([5, 0], dtype=torch.int32))
    stored, out = poisoned(m, width, dtype=dtype), poisoned(m, width, dtype=dtype)
    norm = row_norm("RMS", width, dtype)
    prepared = residual(
        Gather(tokens, table, 3.0, positions, positions_offset=2),
        stored=stored,
        out=out,
        norm=norm,
        lengths=lengths,
        tokens_each=tokens_each,
    )
    memory = [
        *given(tokens=tokens, lengths=lengths),
        *constants(embedding=table, positions=positions),
        *results(stored=stored, out=out),
        *weights_of("norm's", norm),
    ]
    start(builder, prepared, memory)
    expected = (table[tokens] * 3.0).double()
    if positions is not None:
        places = lengths.long().repeat_interleave(tokens_each) + torch.arange(tokens_each).repeat(batch) + 2
        expected = expected + positions[places].double()
    assert relative_error(stored, expected) < BOUND[dtype]
    assert relative_error(out, expected_norm(stored.double(), norm)) < BOUND[dtype]


@pytest.mark.parametrize(("kind", "dtype"), in_turn(("RMS_WIDE", "LAYER"), DTYPES))
def test_norms_of_both_addends_and_several_of_the_sum(
    builder: Builder, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(6)
    m, width = 2, 264
    x, first, second = (strided(m, width, width + 8, dtype) for _ in range(3))
    names = ("own first", "own second", "post", "norm", "further 0", "further 1")
    norms = {name: row_norm(kind, width, dtype, bias=kind == "LAYER") for name in names}
    stored = strided(m, width, width + 8, dtype).fill_(torch.nan)
    outs = [poisoned(m, width, dtype=dtype) for _ in range(3)]
    prepared = residual(
        x,
        stored=stored,
        out=outs[0],
        norm=norms["norm"],
        first=first,
        second=second,
        own=(norms["own first"], norms["own second"]),
        post=norms["post"],
        further=[(norms["further 0"], outs[1]), (norms["further 1"], outs[2])],
        scale=0.5,
    )
    memory = [
        *given(residual=x, first=first, second=second),
        *results(stored=stored, **{f"out {index}": out for index, out in enumerate(outs)}),
        *(each for name, norm in norms.items() for each in weights_of(name, norm)),
    ]
    start(builder, prepared, memory, seed=6)
    added = expected_norm(first.double(), norms["own first"]) + expected_norm(
        second.double(), norms["own second"]
    )
    total = 0.5 * (x.double() + expected_norm(added, norms["post"]))
    # Both norms and their sum are rounded before the norm of the sum.
    assert relative_error(stored, total) < 2 * BOUND[dtype]
    for out, name in zip(outs, ("norm", "further 0", "further 1"), strict=True):
        assert relative_error(out, expected_norm(stored.double(), norms[name])) < BOUND[dtype]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"second": None}, "own norms"),
        ({"norm": None, "out": None}, "further norms"),
        ({"own": (RowNorm("RMS", None, None, 1e-6), RowNorm("LAYER", None, None, 1e-6))}, "own norms"),
        ({"further": 3}, "further norms"),
    ],
)
def test_norms_that_do_not_fit_are_refused(wrong: dict[str, Any], reason: str) -> None:
    x, norm = torch.zeros(2, 64, dtype=torch.float16), RowNorm("RMS", None, None, 1e-6)
    fitting = {"first": x, "second": x, "own": (norm, norm), "norm": norm, "out": x, "further": 1}
    changed: dict[str, Any] = fitting | wrong
    changed["further"] = [(norm, x)] * changed["further"]
    with pytest.raises(ValueError, match=reason):
        residual(x, **changed)


def test_lengths_grow_at_the_end(builder: Builder) -> None:
    x, out = apart(random(2, 64, dtype=torch.float16)), poisoned(2, 64, dtype=torch.float16)
    lengths = apart(torch.arange(70, dtype=torch.int32))
    prepared = residual(x, out=out, norm=RowNorm("RMS", None, None, 1e-6), counter=lengths)
    memory = [
        *given(residual=x),
        *results(out=out),
        Memory("lengths", lengths, writable=True, after_previous=True, holds_values=True),
    ]
    start(builder, prepared, memory)
    assert lengths.tolist() == list(range(1, 71))


def test_rows_are_kept_at_their_places(builder: Builder) -> None:
    x, out = apart(random(3, 576, dtype=torch.float16)), poisoned(3, 576, dtype=torch.float16)
    lengths, kept = apart(torch.tensor([4, 5, 9], dtype=torch.int32)), apart(torch.zeros(10, 576).half())
    norm = RowNorm("RMS", None, None, 1e-6)
    prepared = residual(x, out=out, norm=norm, counter=lengths, kept=kept)
    memory = [
        *given(residual=x),
        *results(out=out),
        Memory("kept", kept, writable=True, holds_values=True),
        Memory("lengths", lengths, writable=True, after_previous=True, holds_values=True),
    ]
    start(builder, prepared, memory)
    assert lengths.tolist() == [5, 6, 10]
    assert torch.equal(kept[[4, 5, 9]], out)
    assert not kept[[0, 1, 2, 3, 6, 7, 8]].any()
    assert relative_error(out, expected_norm(x.double(), norm)) < BOUND[torch.float16]
    with pytest.raises(ValueError, match="a counter of each row"):
        residual(x, out=out, norm=norm, counter=lengths[:2], kept=kept)


def check_routed_rows(
    builder: Builder,
    dtype: torch.dtype = torch.float16,
    *,
    gated: bool = True,
    planted: Planted | None = None,
) -> None:
    """Experts' rows of two tokens, added to the residual stream; two pairs have no expert here. A shared
    expert's rows count as their gates say."""
    torch.manual_seed(3)
    m, top, width = 2, 5, 136
    x, rows = strided(m, width, width + 8, dtype), strided(m * top, width, width + 24, dtype)
    second = strided(m, width, width + 8, dtype)
    gates = apart(torch.rand(m, 1)) if gated else None
    places = torch.randperm(m * top).view(m, top).to(torch.int32)
    places[0, 3] = places[1, 0] = -1
    places, routing = apart(places), apart(torch.rand(m, top))
    stored, out = poisoned(m, width + 8, dtype=dtype)[:, :width], poisoned(m, width, dtype=dtype)
    norm, routed = RowNorm("RMS", None, None, 1e-6), RoutedRows(rows, places, routing)
    prepared = residual(
        x, stored=stored, out=out, norm=norm, first=routed, second=second, gates=gates, factor=0.5
    )
    memory = [
        *given(residual=x, first=rows, second=second, places=places, routing=routing, gates=gates),
        *results(stored=stored, out=out),
    ]
    start(builder, prepared, memory, planted=planted)
    taken = rows.double()[places.clamp(min=0).long()] * (places >= 0).unsqueeze(2)
    summed = torch.einsum("mtw,mt->mw", taken, routing.double()).to(dtype).double()
    count = 1.0 if gates is None else gates.double()
    expected = x.double() + 0.5 * summed + 0.5 * count * second.double()
    assert relative_error(stored, expected) < BOUND[dtype]
    assert relative_error(out, expected_norm(stored.double(), norm)) < BOUND[dtype]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_experts_are_summed(builder: Builder, dtype: torch.dtype, gated: bool) -> None:
    check_routed_rows(builder, dtype, gated=gated)


FAULTS = {
    "rows of pairs that are elsewhere": Planted("routed_row_elsewhere", "true"),
    "the first slot's weight for all": Planted("routing_of_slot", "routing[0]"),
    "the first row's places for all": Planted("places_of_row", "threadIdx.x"),
    "the first row's gate for all": Planted("gate_of_row", "gates"),
    "a second addend without its gate": Planted("second_addend", "factor"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(builder: Builder, name: str) -> None:
    with pytest.raises((AssertionError, KernelFault)):
        check_routed_rows(builder, planted=FAULTS[name])


def test_rows_of_experts_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 64, dtype=torch.float16)
    places, routing = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4)
    for wrong in (
        RoutedRows(x, places[:1], routing),
        RoutedRows(x, places.long(), routing),
        RoutedRows(x, places, routing.half()),
        RoutedRows(x, places, torch.zeros(4, 2).t()),
    ):
        with pytest.raises(ValueError, match="routed rows"):
            residual(x, stored=x, first=wrong)
