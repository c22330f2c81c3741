"""The kernels between products on the emulation: right against float64, in bounds, and in order."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.kernels.step import (
    Addition,
    AttentionShape,
    Division,
    Gather,
    HeadNorm,
    HeadWork,
    RoutedRows,
    RowNorm,
    Workspace,
    activate,
    append,
    attend,
    residual,
    router,
)
from tests.emulation.build import Builder
from tests.emulation.gemm import SOURCES
from tests.emulation.launching import KernelFault, Memory, apart
from tests.emulation.step import start
from tests.kernels.step_problems import (
    BOUND,
    expected_activation,
    expected_attention,
    expected_groups,
    expected_heads,
    expected_norm,
    random,
    relative_error,
    rotation_table,
)
from tests.testing.pairs import every_pair, in_turn

DTYPES = (torch.float16, torch.bfloat16)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for a result that nobody has written."""
    return apart(torch.full(shape, torch.nan, dtype=dtype))


def strided(rows: int, columns: int, stride: int, dtype: torch.dtype) -> Tensor:
    """Random rows that lie further apart than they are long."""
    return apart(random(rows, stride, dtype=dtype)[:, :columns])


def constants(**tensors: Tensor | None) -> list[Memory]:
    """Weights: nobody writes them."""
    return [Memory(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def given(**tensors: Tensor | None) -> list[Memory]:
    """Results of the previous kernel."""
    return [
        Memory(name, tensor, after_previous=True) for name, tensor in tensors.items() if tensor is not None
    ]


def results(**tensors: Tensor | None) -> list[Memory]:
    """What the kernel writes, which the previous one may still read."""
    return [
        Memory(name, tensor, writable=True, after_previous=True)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def row_norm(kind: Any, width: int, dtype: torch.dtype, *, bias: bool = False) -> RowNorm:
    """A normalisation with random weights."""
    return RowNorm(
        kind,
        apart(random(width, dtype=dtype)),
        apart(random(width, dtype=dtype)) if bias else None,
        eps=0.25,  # large enough to be missed
        offset=1.0 if kind == "RMS_WIDE" else 0.0,
    )


def weights_of(prefix: str, norm: RowNorm | HeadNorm | None) -> list[Memory]:
    if norm is None:
        return []
    return constants(**{f"{prefix} weight": norm.weight, f"{prefix} bias": norm.bias})


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
    )
    memory = [
        *given(residual=x, first=added[0] if added else None, second=added[1] if addends > 1 else None),
        *results(stored=stored, out=out),
        *weights_of("norm's", norm),
        *weights_of("post-norm's", post_norm),
    ]
    start(builder, prepared, memory, seed=width)
    total = x.double()
    for index, addend in enumerate(added):
        wide = addend.double()
        total = total + 0.25 * (expected_norm(wide, post_norm) if post_norm and index == 0 else wide)
    if stored is not None:
        assert relative_error(stored, total) < BOUND[dtype]
    if out is not None and norm is not None:
        # The norm is of the rounded sum.
        of = total if stored is None else stored.double()
        assert relative_error(out, expected_norm(of, norm)) < BOUND[dtype]


def head_norm(kind: Any, size: int, count: int, dtype: torch.dtype, *, wide: bool) -> HeadNorm | None:
    """Of ``count`` heads: weights of each where all are normalised together or a mean is subtracted."""
    if kind is None:
        return None
    norm = row_norm(kind, size * (count if wide or kind == "LAYER" else 1), dtype, bias=kind == "LAYER")
    return HeadNorm(**{f.name: getattr(norm, f.name) for f in fields(norm)}, wide=wide)


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


def check_routed_rows(
    builder: Builder, dtype: torch.dtype = torch.float16, *, gated: bool = True, sources: Path = SOURCES
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
    start(builder, prepared, memory, sources=sources)
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


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("        if (places[s] < 0) continue;\n", ""),
        ("fmaf(routing[s], row[j], sum[j])", "fmaf(routing[0], row[j], sum[j])"),
        ("load_scalar(places + m * C::EXPERTS + threadIdx.x)", "load_scalar(places + threadIdx.x)"),
        ("factor * load_scalar(gates + m)", "factor * load_scalar(gates)"),
        ("x[i][j] += second_factor * z[j]", "x[i][j] += factor * z[j]"),
    ],
)
def test_faults_of_sums_are_found(builder: Builder, tmp_path: Path, right: str, wrong: str) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    path = sources / "step" / "residual.cuh"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, KernelFault)):
        check_routed_rows(builder, sources=sources)


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


@pytest.mark.parametrize(
    ("name", "arrangement", "dtype"),
    every_pair(
        list(product(("silu", "gelu", "gelu_tanh", "relu", "relu2"), ("tiles", "halves", "plain"), DTYPES))
    ),
)
def test_activations(builder: Builder, name: str, arrangement: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    m, columns = 5, 192 if arrangement == "tiles" else 136
    parts = 1 if arrangement == "plain" else 2
    x = strided(m, parts * columns, parts * columns + 64, dtype)
    x[0, ::7] *= 40  # where exponentials overflow
    out = strided(m, columns, columns + 8, dtype).fill_(torch.nan)
    start(builder, activate(x, out, name, arrangement), [*given(x=x), *results(out=out)])
    if arrangement == "tiles":
        gate, up = x.double().unflatten(1, (-1, 2, 64)).unbind(2)
        gate, up = gate.flatten(1), up.flatten(1)
    else:
        gate, up = x.double()[:, :columns], x.double()[:, -columns:]
    expected = expected_activation(name, gate)
    if arrangement != "plain":
        expected = expected * up
    assert relative_error(out, expected) < BOUND[dtype]


def route(
    builder: Builder,
    x: Tensor,
    weight: Tensor,
    top: int,
    scoring: str,
    *,
    normalised: bool,
    scale: float = 1.0,
    correction: Tensor | None = None,
    groups: tuple[int, int, bool] = (1, 1, False),
    wide: bool = False,
    gate: Tensor | None = None,
    gates: Tensor | None = None,
    clusters: bool = True,
    sources: Path = SOURCES,
) -> tuple[Tensor, Tensor]:
    """The kernel's numbers and weights; the shared expert's go to ``gates``."""
    m = x.shape[0]
    ids = apart(torch.full((m, top), -1, dtype=torch.int32))
    weights = poisoned(m, top, dtype=torch.float32)
    prepared = router(
        *(x, weight, ids, weights),
        scoring=scoring,
        normalised=normalised,
        scale=scale,
        correction=correction,
        groups=groups[0],
        kept=groups[1],
        zeroed=groups[2],
        wide=wide,
        gate=gate,
        gates=gates,
        clusters=clusters,
    )
    memory = [
        *given(x=x),
        *constants(weight=weight, correction=correction, gate=gate),
        *results(ids=ids, weights=weights, gates=gates),
    ]
    start(builder, prepared, memory, capability=90 if clusters else 80, sources=sources)
    return ids, weights


# Experts, width, how many are taken, scoring, normalised, scale.
ROUTERS = [
    (4, 64, 2, "softmax", False, 1.0),
    (128, 320, 8, "softmax", True, 1.0),
    (60, 2056, 4, "sigmoid", True, 2.5),
    (512, 128, 10, "sigmoid", False, 1.0),
]


@pytest.mark.parametrize(
    ("values", "dtype", "clusters"), every_pair(list(product(ROUTERS, DTYPES, (True, False))))
)
def test_routers(
    builder: Builder, values: tuple[int, int, int, str, bool, float], dtype: torch.dtype, clusters: bool
) -> None:
    experts, width, top, scoring, normalised, scale = values
    torch.manual_seed(3)
    # Eighths, of which sums are exact, so that rounding exchanges nothing and many logits are equal.
    x = apart((2 * torch.randn(3, width + 8)).round().clamp(-3, 3).to(dtype)[:, :width])
    weight = apart((2 * torch.randn(experts, width)).round().clamp(-3, 3).div(64).to(dtype))
    ids, weights = route(
        builder, x, weight, top, scoring, normalised=normalised, scale=scale, clusters=clusters
    )
    logits = (x.double() @ weight.double().T).to(dtype).double()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    taken = (-logits).sort(dim=-1, stable=True).indices[:, :top]
    expected = scores.gather(1, taken)
    if normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids.long(), taken)
    # A few hundred terms of float32 and an exponential of 2 ulp.
    assert relative_error(weights, scale * expected) < 1e-6


def check_correction(
    builder: Builder,
    scoring: str = "sigmoid",
    *,
    experts: int = 60,
    rows: int = 3,
    top: int = 4,
    groups: tuple[int, int, bool] = (1, 1, False),
    shift: float = 0.0,
    normalised: bool = True,
    clusters: bool = True,
    sources: Path = SOURCES,
) -> None:
    """The choice is of corrected scores, the weights are of the scores; logits keep float32's digits."""
    torch.manual_seed(6)
    dtype = torch.bfloat16
    x = apart(torch.randn(rows, 264).to(dtype)[:, :256])
    weight = apart(torch.randn(experts, 256).div(16).to(dtype))
    correction = apart(torch.randn(experts) / (2 if scoring == "sigmoid" else 30) + shift)
    ids, weights = route(
        *(builder, x, weight, top, scoring),
        normalised=normalised,
        scale=2.5,
        correction=correction,
        groups=groups,
        wide=True,
        clusters=clusters,
        sources=sources,
    )
    logits = x.double() @ weight.double().T
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    decisive = scores + correction.double()
    count, kept, zeroed = groups
    if count > 1:
        decisive = expected_groups(decisive, count, kept, zeroed=zeroed)
    taken = (-decisive).sort(dim=-1, stable=True).indices[:, :top]
    assert torch.equal(ids.long(), taken)
    if count > 1:
        plain = (scores + correction.double()).sort(-1, descending=True).indices[:, :top]
        assert not torch.equal(taken, plain)
    assert not torch.equal(taken, logits.sort(-1, descending=True).indices[:, :top])
    expected = scores.gather(1, taken)
    if normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    # Sums of 256 products in float32, and exponentials of 2 ulp.
    assert relative_error(weights, 2.5 * expected) < 2e-6


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("scoring", "experts"), [("sigmoid", 60), ("softmax", 300)])
@pytest.mark.parametrize("normalised", [True, False])
def test_corrected_routers(
    builder: Builder, scoring: str, experts: int, normalised: bool, clusters: bool
) -> None:
    check_correction(builder, scoring, experts=experts, normalised=normalised, clusters=clusters)


@pytest.mark.parametrize(
    ("scoring", "right", "wrong"),
    [
        ("sigmoid", " + correction[lane + 32 * i]", ""),
        ("sigmoid", "correction[lane + 32 * i]", "correction[lane]"),
        ("sigmoid", "const float best = logits[at];", "const float best = mine[0];"),
        ("sigmoid", "C::WIDE ? sum : rounded<E>(sum)", "rounded<E>(sum)"),
        ("sigmoid", "mine[i] = score(mine[i], highest, all)", "mine[i] = mine[i]"),
        ("softmax", "if (C::SOFTMAX && !C::CORRECTED && s == 0)", "if (C::SOFTMAX && s == 0)"),
        ("softmax", "highest = from_ordered(warp_max(key))", "highest = mine[0]"),
    ],
)
def test_faults_of_corrections_are_found(
    builder: Builder, tmp_path: Path, scoring: str, right: str, wrong: str
) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    path = sources / "step" / "router.cuh"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, KernelFault)):
        check_correction(builder, scoring, experts=100, normalised=False, sources=sources)


# Groups of more and of fewer experts than lanes, as many as lanes, and all but one or one of them kept.
GROUPS = [
    (256, 8, (8, 4, False), 0.0, True),
    (256, 8, (8, 4, True), 0.0, False),
    # All sums are negative, so what counts as zero comes first.
    (256, 8, (8, 4, True), -4.0, True),
    (64, 2, (32, 1, False), 0.0, True),
    (100, 16, (4, 3, False), 0.0, False),
    (96, 3, (2, 1, False), -4.0, True),
]


@pytest.mark.parametrize(("experts", "top", "groups", "shift", "clusters"), GROUPS)
def test_groups_of_experts(
    builder: Builder,
    experts: int,
    top: int,
    groups: tuple[int, int, bool],
    shift: float,
    clusters: bool,
) -> None:
    check_correction(builder, experts=experts, top=top, groups=groups, shift=shift, clusters=clusters)


@pytest.mark.parametrize(
    ("zeroed", "right", "wrong"),
    [
        (False, "second = fmaxf(second, fminf(best, value))", "second = fminf(second, fminf(best, value))"),
        (False, "ordered(best + second)", "ordered(best)"),
        (False, "decisive[lane * size + at]", "decisive[at]"),
        (False, "before < C::KEPT", "before <= C::KEPT"),
        (False, "groups >> expert / size & 1", "groups >> expert % C::GROUPS & 1"),
        (False, "        __syncwarp();\n", ""),
        (True, "if (C::ZEROED) mine[i] = 0.f;\n                else taken", "taken"),
        (False, "if (C::ZEROED) mine[i]", "if (true) mine[i]"),
    ],
)
def test_faults_of_groups_are_found(
    builder: Builder, tmp_path: Path, zeroed: bool, right: str, wrong: str
) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    path = sources / "step" / "router.cuh"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, KernelFault)):
        check_correction(builder, experts=128, rows=8, groups=(4, 2, zeroed), shift=-4.0, sources=sources)


@pytest.mark.parametrize(
    ("groups", "kept", "corrected"),
    [(3, 1, True), (8, 4, True), (4, 5, True), (4, 1, True), (4, 2, False)],
)
def test_groups_that_do_not_fit_are_refused(groups: int, kept: int, corrected: bool) -> None:
    x, weight = torch.zeros(2, 64, dtype=torch.float16), torch.zeros(8, 64, dtype=torch.float16)
    ids, weights = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=f"{kept} of {groups} groups"):
        router(
            *(x, weight, ids, weights),
            scoring="sigmoid",
            normalised=True,
            correction=torch.zeros(8) if corrected else None,
            groups=groups,
            kept=kept,
        )


def check_gate(
    builder: Builder,
    dtype: torch.dtype = torch.float16,
    *,
    experts: int = 60,
    width: int = 320,
    clusters: bool = True,
    sources: Path = SOURCES,
) -> None:
    """A shared expert's gate beside a choice that it does not change."""
    torch.manual_seed(8)
    x = apart((2 * torch.randn(3, width + 8)).round().clamp(-3, 3).to(dtype)[:, :width])
    weight, gate = (
        apart((2 * torch.randn(*shape)).round().clamp(-3, 3).div(64).to(dtype))
        for shape in ((experts, width), (width,))
    )
    gates = poisoned(3, 1, dtype=torch.float32)
    ids, weights = route(
        *(builder, x, weight, 4, "softmax"),
        normalised=True,
        gate=gate,
        gates=gates,
        clusters=clusters,
        sources=sources,
    )
    # Eighths, of which sums are exact; then one exponential of 2 ulp.
    logits = (x.double() @ gate.double()).to(dtype).double()
    assert relative_error(gates, logits.sigmoid()[:, None]) < 1e-6
    alone = route(builder, x, weight, 4, "softmax", normalised=True, clusters=clusters)
    assert torch.equal(ids, alone[0])
    assert torch.equal(weights, alone[1])


# The gate's warp has experts too, or is a warp of its own, whose logit has four neighbours or none.
@pytest.mark.parametrize(
    ("experts", "width", "clusters"),
    [(60, 320, True), (60, 320, False), (64, 4160, False), (130, 264, True), (8, 64, True)],
)
def test_a_shared_experts_gate(builder: Builder, experts: int, width: int, clusters: bool) -> None:
    dtype = torch.bfloat16 if experts == 64 else torch.float16
    check_gate(builder, dtype, experts=experts, width=width, clusters=clusters)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("C::GATED && expert == experts ? gate : ", ""),
        ("four < (row.products() + 3) / 4;", "four < (experts + 3) / 4;"),
        ("gates[m] = 1.f / (1.f + expf(-logits[experts]))", "gates[m] = logits[experts]"),
        ("expert < products(); expert += CLUSTER", "expert < experts; expert += CLUSTER"),
        ("gates[m] = 1.f", "gates[0] = 1.f"),
    ],
)
def test_faults_of_gates_are_found(builder: Builder, tmp_path: Path, right: str, wrong: str) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    path = sources / "step" / "router.cuh"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, KernelFault)):
        check_gate(builder, sources=sources)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gate": None},
        {"gates": None},
        {"gate": torch.zeros(72, dtype=torch.float16)},
        {"gate": torch.zeros(64)},
        {"gates": torch.zeros(2)},
        {"gates": torch.zeros(2, 1, dtype=torch.float16)},
    ],
)
def test_gates_that_do_not_fit_are_refused(wrong: dict[str, Tensor | None]) -> None:
    x, weight = torch.zeros(2, 64, dtype=torch.float16), torch.zeros(4, 64, dtype=torch.float16)
    ids, weights = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    both: dict[str, Any] = {"gate": torch.zeros(64, dtype=torch.float16), "gates": torch.zeros(2, 1)}
    with pytest.raises(ValueError, match="gate"):
        router(x, weight, ids, weights, scoring="softmax", normalised=True, **{**both, **wrong})


def check_addition(
    builder: Builder,
    kind: Any = "RMS",
    dtype: torch.dtype = torch.float16,
    *,
    width: int = 320,
    clusters: bool = True,
    sources: Path = SOURCES,
) -> None:
    """A router that makes its own input; what it chooses is what it would choose of the rows that it made."""
    torch.manual_seed(4)
    m, top, experts = 3, 8, 128
    source, first = strided(m, width, width + 8, dtype), strided(m, width, width + 16, dtype)
    stored = poisoned(m, width + 8, dtype=dtype)[:, :width]
    x = poisoned(m, width + 24, dtype=dtype)[:, :width]
    norm_weight, bias = apart(random(width, dtype=dtype)), apart(random(width, dtype=dtype))
    norm = RowNorm(kind, norm_weight, bias if kind == "LAYER" else None, 1e-6, 0.25)
    weight = apart(random(experts, width, dtype=dtype))
    ids, weights = apart(torch.full((m, top), -1, dtype=torch.int32)), poisoned(m, top, dtype=torch.float32)
    prepared = router(
        *(x, weight, ids, weights),
        scoring="softmax",
        normalised=True,
        clusters=clusters,
        addition=Addition(source, first, stored, norm, 0.5),
    )
    memory = [
        *given(source=source, first=first),
        *constants(weight=weight, norm_weight=norm_weight, norm_bias=norm.bias),
        *results(stored=stored, x=x, ids=ids, weights=weights),
    ]
    start(builder, prepared, memory, capability=90 if clusters else 80, sources=sources)
    assert relative_error(stored, source.double() + 0.5 * first.double()) < BOUND[dtype]
    assert relative_error(x, expected_norm(stored.double(), norm)) < BOUND[dtype]
    alone = route(builder, apart(x.clone()), weight, top, "softmax", normalised=True, clusters=clusters)
    assert torch.equal(ids, alone[0])
    assert torch.equal(weights, alone[1])


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("kind", "width"), [("RMS", 320), ("RMS_WIDE", 4160), ("LAYER", 64)])
def test_a_router_makes_its_own_input(builder: Builder, kind: str, width: int, clusters: bool) -> None:
    dtype = torch.bfloat16 if kind == "LAYER" else torch.float16
    check_addition(builder, kind, dtype, width=width, clusters=clusters)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("values[i][j] += given.factor * addend[j]", "values[i][j] += addend[j]"),
        ("            if (rank == 0) x[v] = row[v];\n", ""),
        ("= row[v];\n        }\n        __syncthreads();\n", "= row[v];\n        }\n"),
        ("        wait_for_previous_kernel();\n", ""),
    ],
)
def test_faults_of_additions_are_found(builder: Builder, tmp_path: Path, right: str, wrong: str) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    path = sources / "step" / "router.cuh"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, KernelFault)):
        check_addition(builder, sources=sources)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "~warp_max(key == most ? ~static_cast<u32>(at) : 0u)",
            "warp_max(key == most ? static_cast<u32>(at) : 0u)",
        ),
        ("logits[lane + 32 * i] + 0.f", "logits[lane + 32 * i]"),
        ("C::NORMALISED ? kept / sum : kept", "kept"),
        (" : kept) * scale", " : kept)"),
        ("taken |= 1u << at / 32", "taken |= 0u"),
        ("                if (owner == 0) continue;\n", "                continue;\n"),
    ],
)
def test_faults_of_routers_are_found(builder: Builder, tmp_path: Path, right: str, wrong: str) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    path = sources / "step" / "router.cuh"
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, KernelFault)):
        check_equal_logits(builder, sources)


def check_equal_logits(builder: Builder, sources: Path = SOURCES) -> None:
    """Logits 1, 2, 3, 3, ... of 64 experts, of which four are equal; then -0 and 0, which are."""
    x = apart(torch.eye(1, 64, dtype=torch.float16))
    weight = torch.zeros(64, 64, dtype=torch.float16)
    weight[:, 0] = torch.linspace(0, 1, 64)
    weight[[3, 20, 40, 63], 0] = 3.0
    ids, weights = route(builder, x, apart(weight), 3, "softmax", normalised=True, scale=2.5, sources=sources)
    assert ids.tolist() == [[3, 20, 40]]
    assert torch.allclose(weights, torch.full((1, 3), 2.5 / 3))
    x = apart(torch.full((1, 64), 0.125, dtype=torch.float16))
    weight = torch.full((64, 64), -1.0, dtype=torch.float16)
    # The logit of 3 is a quarter of the smallest number below 0.
    weight[[3, 5]], weight[3, 0] = 0.0, -(2.0**-23)
    ids, _ = route(builder, x, apart(weight), 2, "softmax", normalised=True, sources=sources)
    assert ids.tolist() == [[3, 5]]


def test_equal_logits_go_to_the_lowest_numbers(builder: Builder) -> None:
    check_equal_logits(builder)


# (heads, kv_heads, D, rotated channels, interleaved, norm, wide)
HEADS = [
    (4, 2, 64, 64, False, None, False),
    (3, 1, 80, 32, False, None, False),
    (8, 8, 16, 16, False, "RMS", False),
    (5, 5, 128, 64, True, "RMS_WIDE", False),
    (4, 4, 96, 96, False, "LAYER", False),
    (6, 2, 32, 32, False, "RMS", True),
    (2, 1, 256, 0, False, None, False),
    (9, 3, 8, 6, True, None, False),
]


@pytest.mark.parametrize(("shape", "tokens_each", "dtype"), every_pair(list(product(HEADS, (1, 3), DTYPES))))
def test_rotation_and_cache(
    builder: Builder, shape: tuple[Any, ...], tokens_each: int, dtype: torch.dtype
) -> None:
    heads, kv, size, channels, interleaved, kind, wide = shape
    torch.manual_seed(size)
    batch, capacity = 2, 9
    m, columns = batch * tokens_each, (heads + 2 * kv) * size
    x = strided(m, columns, columns + 64, dtype)
    turns = kv if kv > 1 and not wide and kind is None else 1
    table = apart(rotation_table(capacity, channels)) if channels else None
    lengths = apart(torch.tensor([5, 0], dtype=torch.int32))
    norms = [head_norm(kind, size, count, dtype, wide=wide) for count in (heads, kv)]
    q = poisoned(m, heads, size, dtype=dtype)
    keys, values = (poisoned(batch, kv, capacity, size, dtype=dtype) for _ in range(2))
    work = HeadWork(table=table, interleaved=interleaved, query_norm=norms[0], key_norm=norms[1], turns=turns)
    prepared = append(x, q, keys, values, lengths, work, tokens_each=tokens_each)
    memory = [
        *given(x=x, lengths=lengths),
        *constants(table=table),
        *weights_of("query norm's", norms[0]),
        *weights_of("key norm's", norms[1]),
        *results(q=q, keys=keys, values=values),
    ]
    start(builder, prepared, memory, seed=size)
    positions = lengths.long().repeat_interleave(tokens_each) + torch.arange(tokens_each).repeat(batch)
    wanted = expected_heads(x, heads, kv, size, positions, work)
    assert relative_error(q, wanted[0]) < BOUND[dtype]
    sequences = torch.arange(batch).repeat_interleave(tokens_each)
    assert relative_error(keys[sequences, :, positions], wanted[1]) < BOUND[dtype]
    assert torch.equal(values[sequences, :, positions].double(), wanted[2])
    assert int(values.isnan().logical_not().sum()) == m * kv * size, "another position was written"


def test_a_full_cache_takes_nothing(builder: Builder) -> None:
    x = apart(random(2, 3 * 16, dtype=torch.float16))
    lengths = apart(torch.tensor([4, 3], dtype=torch.int32))
    q = poisoned(2, 1, 16, dtype=torch.float16)
    keys, values = (poisoned(2, 1, 4, 16, dtype=torch.float16) for _ in range(2))
    memory = [*given(x=x, lengths=lengths), *results(q=q, keys=keys, values=values)]
    start(builder, append(x, q, keys, values, lengths, HeadWork()), memory)
    assert torch.equal(keys[1, 0, 3], x[1, 16:32])
    assert int(keys.isnan().logical_not().sum()) == 16


# (heads, kv_heads, D, lengths, splits, window, softcap), warps, rotated channels, interleaved, norm, wide
CACHES = [
    ((4, 2, 64, (0, 1, 40), 1, None, None), 4, 64, False, None, False),
    ((8, 1, 128, (15, 16, 17), 1, None, None), 8, 128, False, "RMS", False),
    ((12, 1, 16, (90, 300), 4, None, None), 4, 16, True, None, False),
    ((4, 4, 80, (63, 64, 65, 129), 3, None, None), 4, 32, False, "LAYER", False),
    ((2, 1, 96, (200,), 2, 50, None), 8, 96, False, "RMS", True),
    ((3, 1, 256, (70, 150), 3, None, 20.0), 4, 256, False, "RMS_WIDE", False),
    ((16, 2, 64, (319, 10), 5, 100, 5.0), 8, 0, False, None, False),
    ((1, 1, 128, (447, 0, 191), 7, None, None), 4, 128, False, None, False),
    ((6, 2, 8, (33, 31, 32), 2, None, None), 4, 6, True, "RMS", True),
]


@pytest.mark.parametrize(("case", "dtype"), in_turn(CACHES, DTYPES), ids=str)
def test_attention(builder: Builder, case: tuple[Any, ...], dtype: torch.dtype) -> None:
    numbers, warps, channels, interleaved, kind, wide = case
    heads, kv, size, lengths, splits, window, softcap = numbers
    torch.manual_seed(size + splits)
    batch, capacity = len(lengths), max(lengths) + 2
    columns = (heads + 2 * kv) * size
    x = strided(batch, columns, columns + 64, dtype)
    table = apart(rotation_table(capacity, channels)) if channels else None
    norms = [head_norm(kind, size, count, dtype, wide=wide) for count in (heads, kv)]
    turns = kv if kind is None else 1
    work = HeadWork(table=table, interleaved=interleaved, query_norm=norms[0], key_norm=norms[1], turns=turns)
    filled = [random(batch, kv, capacity, size, dtype=dtype) for _ in range(2)]
    # The new token's place, and what no sequence has reached yet, may hold anything.
    for cache in filled:
        for b, length in enumerate(lengths):
            cache[b, :, length:] = torch.nan
    counted = apart(torch.tensor(lengths, dtype=torch.int32))
    shape = AttentionShape(batch, heads, kv, size, capacity)
    divided = Division(splits, warps)
    made = Workspace.of([(shape, divided)], torch.device("cpu"))
    counters = apart(made.counters)
    found = []
    runs = [(divided, 1), (divided, 4)]
    if splits > 1:
        runs.append((divided._replace(meets=True), 1))
    for division, resident in runs:
        keys, values = (apart(cache) for cache in filled)
        out = poisoned(batch, heads, size, dtype=dtype)
        workspace = Workspace(apart(made.partials.fill_(torch.nan)), counters)
        prepared = attend(
            *(x, keys, values, out, counted, work, workspace),
            scale=size**-0.5,
            division=division,
            window=window,
            softcap=softcap,
        )
        memory = [
            *given(x=x),
            *constants(table=table, lengths=counted),
            *weights_of("query norm's", norms[0]),
            *weights_of("key norm's", norms[1]),
            # Of these, earlier kernels of the step have written nothing.
            Memory("keys", keys, writable=True, holds_values=True),
            Memory("values", values, writable=True, holds_values=True),
            *results(out=out, partials=workspace.partials),
            Memory("counters", counters, writable=True, after_previous=True, flags=True),
        ]
        start(builder, prepared, memory, seed=size + resident, resident=resident)
        assert not counters.any()
        if division.meets:
            assert workspace.partials.isnan().all(), "splits that are a cluster leave nothing in memory"
        found.append(out)
    q, new_keys, new_values = expected_heads(x, heads, kv, size, counted.long(), work)
    for cache, filling, new in ((keys, filled[0], new_keys), (values, filled[1], new_values)):
        places = torch.arange(batch), slice(None), counted.long()
        assert relative_error(cache[places], new) < BOUND[dtype]
        cache[places] = filling[places]
        assert torch.equal(cache.view(torch.int16), filling.view(torch.int16)), "another place was written"
        filling[places] = new.to(dtype)
    # Queries and keys are rounded as they are in memory.
    expected = expected_attention(
        q.to(dtype), *filled, counted, scale=size**-0.5, window=window, softcap=softcap
    )
    assert relative_error(found[0], expected) < BOUND[dtype]
    assert all(torch.equal(out, found[0]) for out in found), "how splits meet, or when, shows in the bits"


# What attention may not leave out: a name, text of the source, what stands there instead, what is reported.
ATTENTION_FAULTS = [
    ("no wait for the product", "    wait_for_previous_kernel();\n", "", "griddepcontrol.wait"),
    (
        "heads not waited for",
        "    }\n    __syncthreads();\n",
        "    }\n",
        "without waiting for it|still be reading",
    ),
    ("the newest token not attended to", "newest_here = tile <= newest", "newest_here = tile < 0", "wrong"),
    (
        "a cluster that does not meet",
        "        cluster_arrive();\n        cluster_wait();\n",
        "",
        "without waiting",
    ),
    (
        "a block that leaves before it has been read",
        "        cluster_arrive_relaxed();\n        cluster_wait();\n        return;\n",
        "        return;\n",
        "which has ended",
    ),
]


@pytest.mark.parametrize("fault", ATTENTION_FAULTS, ids=lambda fault: fault[0])
def test_faults_planted_into_attention_are_reported(
    builder: Builder, tmp_path: Path, fault: tuple[str, str, str, str]
) -> None:
    _, text, instead, reported = fault
    sources = tmp_path / "cuda"
    shutil.copytree(SOURCES, sources)
    planted = sources / "step" / "attend.cuh"
    source = planted.read_text(encoding="utf-8")
    assert text in source
    planted.write_text(source.replace(text, instead, 1), encoding="utf-8")
    torch.manual_seed(0)
    dtype, size, length = torch.float16, 64, 200
    x, out = apart(random(1, 4 * size, dtype=dtype)), poisoned(1, 2, size, dtype=dtype)
    keys, values = (apart(random(1, 1, length + 1, size, dtype=dtype)) for _ in range(2))
    for cache in (keys, values):
        cache[:, :, length] = torch.nan
    lengths = apart(torch.tensor([length], dtype=torch.int32))
    division = Division(3, meets=True)
    made = Workspace.of([(AttentionShape(1, 2, 1, size, length + 1), division)], torch.device("cpu"))
    workspace = Workspace(apart(made.partials), apart(made.counters))
    prepared = attend(x, keys, values, out, lengths, HeadWork(), workspace, scale=0.125, division=division)
    memory = [
        *given(x=x),
        *constants(lengths=lengths),
        Memory("keys", keys, writable=True, holds_values=True),
        Memory("values", values, writable=True, holds_values=True),
        *results(out=out, partials=workspace.partials),
        Memory("counters", workspace.counters, writable=True, after_previous=True, flags=True),
    ]
    q, *new = expected_heads(x, 2, 1, size, lengths.long(), HeadWork())
    whole = [cache.clone() for cache in (keys, values)]
    for cache, fresh in zip(whole, new, strict=True):
        cache[:, :, length] = fresh.to(dtype)
    expected = expected_attention(q.to(dtype), *whole, lengths, scale=0.125, window=None, softcap=None)
    found = "nothing"
    for seed in range(4):
        try:
            start(builder, prepared, memory, seed=seed, sources=sources)
        except KernelFault as problem:
            found = str(problem)
            break
        if not relative_error(out, expected) < BOUND[dtype]:
            found = "wrong"
            break
    assert re.search(reported, found), found


def test_attention_over_a_full_cache(builder: Builder) -> None:
    dtype, size = torch.float16, 64
    x, out = apart(random(2, 3 * size, dtype=dtype)), poisoned(2, 1, size, dtype=dtype)
    keys, values = (apart(random(2, 1, 40, size, dtype=dtype)) for _ in range(2))
    kept = keys.clone(), values.clone()
    lengths = apart(torch.tensor([40, 43], dtype=torch.int32))
    division = Division(2)
    made = Workspace.of([(AttentionShape(2, 1, 1, size, 40), division)], torch.device("cpu"))
    workspace = Workspace(apart(made.partials), apart(made.counters))
    prepared = attend(x, keys, values, out, lengths, HeadWork(), workspace, scale=0.125, division=division)
    memory = [
        *given(x=x),
        *constants(lengths=lengths, keys=keys, values=values),
        *results(out=out, partials=workspace.partials),
        Memory("counters", workspace.counters, writable=True, after_previous=True, flags=True),
    ]
    start(builder, prepared, memory, resident=2)
    q = x[:, :size].view(2, 1, size)
    expected = expected_attention(q, *kept, torch.tensor([39, 39]), scale=0.125, window=None, softcap=None)
    assert relative_error(out, expected) < BOUND[dtype]


def test_kernels_of_older_gpus(builder: Builder) -> None:
    dtype = torch.float16
    x, out = apart(random(1, 4 * 64, dtype=dtype)), poisoned(1, 2, 64, dtype=dtype)
    keys, values = (apart(random(1, 1, 200, 64, dtype=dtype)) for _ in range(2))
    lengths = apart(torch.tensor([180], dtype=torch.int32))
    shape = AttentionShape(1, 2, 1, 64, 200)
    division = Division(3)
    made = Workspace.of([(shape, division)], torch.device("cpu"))
    workspace = Workspace(apart(made.partials), apart(made.counters))
    prepared = attend(x, keys, values, out, lengths, HeadWork(), workspace, scale=0.125, division=division)
    memory = [
        *given(x=x, lengths=lengths),
        Memory("keys", keys, writable=True, holds_values=True),
        Memory("values", values, writable=True, holds_values=True),
        *results(out=out, partials=workspace.partials),
        Memory("counters", workspace.counters, writable=True, flags=True),
    ]
    start(builder, prepared, memory, capability=86, resident=2)
