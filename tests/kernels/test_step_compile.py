"""The kernels between products compile for every architecture without spilling registers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.kernels import ARCHITECTURES
from marlinq.kernels.contract.instantiation import Instantiation, unit
from marlinq.kernels.driver.compiler import compile_text
from marlinq.kernels.step import (
    ROUTER_WIDEST,
    Addition,
    AttentionShape,
    AttentionWorkspace,
    ConvolutionWeights,
    DeltaWeights,
    Division,
    Gates,
    Gather,
    HeadNorm,
    HeadWork,
    LatentDivision,
    LatentWeights,
    LatentWorkspace,
    LayerInputWeights,
    MambaWeights,
    MambaWorkspace,
    Prepared,
    RateWeights,
    RoutedRows,
    RowNorm,
    activate,
    append,
    attend,
    delta,
    gated_convolution,
    latent_attend,
    latent_queries,
    latent_values,
    layer_inputs,
    mamba,
    residual,
    router,
)
from marlinq.kernels.step.residual import MOST_FURTHER, WIDEST_SEVERAL
from tests.testing.architectures import QUICK

HALF, BFLOAT16 = torch.float16, torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def residuals() -> list[Prepared]:
    """The widest rows, which take most registers, and every kind of norm, source and addend."""
    prepared = []
    for width, dtype in ((16384, HALF), (4096, HALF), (576, BFLOAT16)):
        x, weight = empty(2, width, dtype=dtype), empty(width, dtype=dtype)
        norms = [RowNorm(kind, weight, weight, 1e-5) for kind in ("RMS", "RMS_WIDE", "LAYER")]
        gather = Gather(torch.zeros(2, dtype=torch.int64), x, positions=x)
        counter = torch.zeros(2, dtype=torch.int32)
        prepared += [
            residual(x, stored=x, out=x, norm=norms[0], first=x),
            residual(x, stored=x, out=x, norm=norms[1], first=x, post=norms[1]),
            residual(x, stored=x, out=x, norm=norms[2], first=x, second=x),
            residual(gather, stored=x, out=x, norm=norms[2]),
            residual(x, stored=x, out=x, norm=norms[0], first=x, second=x, counter=counter, kept=x),
        ]
        for top, gates in ((8, torch.zeros(2, 1)), (32, None)):
            places, routing = torch.zeros(2, top, dtype=torch.int32), torch.zeros(2, top)
            routed = RoutedRows(x, places, routing)
            prepared.append(residual(x, stored=x, out=x, norm=norms[0], first=routed, second=x, gates=gates))
    # ptxas saves registers where one more block then fits beside the others, which depends on the threads.
    widths = ((WIDEST_SEVERAL, HALF, MOST_FURTHER), (2816, HALF, 0), (3072, HALF, 0), (3328, BFLOAT16, 0))
    return [
        *prepared,
        several_norms("LAYER", *widths[0]),
        *(several_norms("RMS_WIDE", *each) for each in widths),
    ]


def several_norms(kind: Any, width: int, dtype: torch.dtype, further: int) -> Prepared:
    """Of both addends, of their sum, and of what is added to it."""
    x = empty(2, width, dtype=dtype)
    norm = RowNorm(kind, x[0], x[0], 1e-5)
    others = [(norm, x)] * further
    return residual(
        x, stored=x, out=x, norm=norm, first=x, second=x, own=(norm, norm), post=norm, further=others
    )


def head_works(size: int, dtype: torch.dtype) -> list[HeadWork]:
    """Without and with norms, of whole and half rotated heads."""
    weight = empty(size, dtype=dtype)
    wide = empty(8 * size, dtype=dtype)
    half = size // 16 * 8
    return [
        HeadWork(table=torch.empty(32, size // 2, 2)),
        HeadWork(
            table=torch.empty(32, size // 2, 2),
            query_norm=HeadNorm("RMS_WIDE", weight, None, 1e-6, 1.0),
            key_norm=HeadNorm("RMS_WIDE", weight, None, 1e-6, 1.0),
        ),
        HeadWork(table=torch.empty(32, half // 2, 2), key_norm=HeadNorm("LAYER", weight, weight, 1e-6)),
        HeadWork(
            table=torch.empty(32, size // 2, 2),
            interleaved=True,
            query_norm=HeadNorm("RMS", wide, None, 1e-6, wide=True),
            key_norm=HeadNorm("RMS", wide, None, 1e-6, wide=True),
        ),
    ]


def appends() -> list[Prepared]:
    prepared = []
    lengths = torch.zeros(1, dtype=torch.int32)
    for size, dtype in ((128, HALF), (256, BFLOAT16), (80, HALF), (64, BFLOAT16)):
        cache = empty(1, 8, 32, size, dtype=dtype)
        x, q = empty(1, 24 * size, dtype=dtype), empty(1, 8, size, dtype=dtype)
        prepared += [append(x, q, cache, cache, lengths, work) for work in head_works(size, dtype)]
    return prepared


def attentions(*, clusters: bool = False) -> list[Prepared]:
    prepared = []
    lengths = torch.zeros(1, dtype=torch.int32)
    # Sums of splits meet when registers for products are free again: a size is enough.
    sizes = ((64, HALF), (80, BFLOAT16), (128, HALF), (128, BFLOAT16), (256, HALF))
    for size, dtype in sizes[2:3] if clusters else sizes:
        shape = AttentionShape(1, 8, 8, size, 32)
        cache = empty(1, 8, 32, size, dtype=dtype)
        x, out = empty(1, 24 * size, dtype=dtype), empty(1, 8, size, dtype=dtype)
        # Heads of 128 channels with every number of warps, the others with one and the other in turn.
        pairs = itertools.product(head_works(size, dtype), (4, 8))
        for number, (work, warps) in enumerate(pairs):
            if size != 128 and number % 4 in (1, 2):
                continue
            division = Division(2, warps, clusters)
            workspace = AttentionWorkspace.of([(shape, division)], torch.device("cpu"))
            prepared.append(
                attend(
                    *(x, cache, cache, out, lengths, work, workspace),
                    scale=1.0,
                    division=division,
                    softcap=20.0 if number % 3 else None,
                    sinks=torch.empty(8) if number % 2 else None,
                )
            )
    if clusters:
        return prepared
    # Heads in slices, with values that are keys, and with another layer's keys.
    norm = HeadNorm("RMS_WIDE", empty(512), None, 1e-6)
    table, cache, out = torch.empty(32, 256, 2), empty(1, 8, 32, 512), empty(1, 8, 512)
    division, shape = Division(2), AttentionShape(1, 8, 8, 512, 32)
    workspace = AttentionWorkspace.of([(shape, division)], torch.device("cpu"))
    for work in (
        HeadWork(table=table, query_norm=norm, key_norm=norm, value_eps=1e-6, keys_are_values=True),
        HeadWork(table=table, query_norm=norm, shared=True),
    ):
        given = (empty(1, 16 * 512), cache, cache, out, lengths, work, workspace)
        prepared.append(attend(*given, scale=1.0, division=division))
    return prepared


def runs() -> list[Prepared]:
    """Neighbouring tokens of one sequence, with gates in every place; norms behind the rotation at last."""
    prepared = []
    cases: list[tuple[int, torch.dtype, Gates]] = [
        *((128, HALF, "queries"), (256, BFLOAT16, "queries")),
        *((128, BFLOAT16, "channels"), (128, HALF, "heads")),
    ]
    for size, dtype, gates in cases:
        cache, x = empty(1, 8, 32, size, dtype=dtype), empty(8, 32 * size, dtype=dtype)
        norm = HeadNorm("RMS_WIDE", empty(size, dtype=dtype), None, 1e-6, 1.0)
        work = HeadWork(
            table=torch.empty(32, size // 2, 2),
            query_norm=norm,
            key_norm=norm,
            gates=gates,
            softplus=gates == "channels",
            norms_behind=gates == "heads",
        )
        division, shape = Division(2, 8), AttentionShape(8, 8, 8, size, 32)
        workspace = AttentionWorkspace.of([(shape, division)], torch.device("cpu"))
        lengths, out = torch.zeros(8, dtype=torch.int32), empty(8, 8, size, dtype=dtype)
        given = (x, cache, cache, out, lengths, work, workspace)
        prepared.append(attend(*given, scale=1.0, division=division, together=True))
    return prepared


# A thread keeps four, four and three vectors of weights with a decay a head, two and one with one a channel.
DELTAS_WITH_RATES = [
    (128, 128, HALF, 8192, False),
    (128, 128, BFLOAT16, 8192, False),
    (128, 128, HALF, 6144, False),
    (128, 128, BFLOAT16, 8192, True),
    (128, 128, BFLOAT16, 2304, True),
]


def deltas() -> list[Prepared]:
    others = [(64, 64, BFLOAT16, 0, False), (96, 192, HALF, 0, False), (128, 128, HALF, 2304, True)]
    return deltas_of([*others, *DELTAS_WITH_RATES])


def deltas_of(forms: list[tuple[int, int, torch.dtype, int, bool]]) -> list[Prepared]:
    prepared = []
    for key_dim, size, dtype, inner, by_channel in forms:
        key_heads = 2 if by_channel else 1
        channels = 2 * key_heads * key_dim + 2 * size
        rows = empty(2, inner, dtype=dtype)
        weights = DeltaWeights(
            weight=torch.empty(channels, 4),
            decay=torch.empty(2),
            step_bias=torch.empty(2 * key_dim if by_channel else 2),
            norm=empty(size, dtype=dtype),
            eps=1e-6,
            key_heads=key_heads,
            value_heads=2,
            key_dim=key_dim,
            turns=1,
            rates=RateWeights(rows, rows) if inner else None,
            by_channel=by_channel,
        )
        x, rates, out = (
            empty(1, columns, dtype=dtype) for columns in (channels + 2 * size, inner or 8, 2 * size)
        )
        ring, state = empty(1, 4, channels, dtype=dtype), torch.empty(1, 2, key_dim, size)
        second = (empty(1, 2 * key_dim, dtype=dtype), empty(1, 2 * size, dtype=dtype)) if by_channel else None
        lengths = torch.zeros(1, dtype=torch.int32)
        prepared.append(delta(x, rates, out, ring, state, lengths, weights, second=second))
    return prepared


def mambas() -> list[Prepared]:
    """Granite's and Nemotron's heads with little and much to do, and the largest state that is published."""
    prepared = []
    for batch, heads, groups, keys, size, norm, dtype in (
        (1, 48, 1, 128, 64, "behind", HALF),
        (4, 128, 8, 128, 64, "behind", BFLOAT16),
        (1, 24, 2, 256, 128, "none", BFLOAT16),
        (1, 24, 2, 128, 64, "first", HALF),
    ):
        width = heads * size
        channels = width + 2 * groups * keys
        per_head = torch.empty(heads)
        weights = MambaWeights(
            *(torch.empty(channels, 4), torch.empty(channels), per_head, per_head, per_head),
            norm=None if norm == "none" else torch.empty(width),
            norm_width=width // groups,
            norm_first=norm == "first",
            eps=1e-6,
            heads=heads,
            head_dim=size,
            groups=groups,
            state_dim=keys,
        )
        x, out = (empty(batch, columns, dtype=dtype) for columns in (width + channels + heads, width))
        ring, state = empty(batch, 4, channels, dtype=dtype), torch.empty(batch, heads, keys, size)
        workspace = MambaWorkspace.of([weights], batch, torch.device("cpu"))
        lengths = torch.zeros(batch, dtype=torch.int32)
        prepared.append(mamba(x, out, ring, state, lengths, weights, workspace))
    return prepared


def convolutions() -> list[Prepared]:
    prepared = []
    for taps, dtype in ((3, HALF), (7, BFLOAT16)):
        weights = ConvolutionWeights(torch.empty(2048, taps), None, gate=1)
        x, out, ring = (empty(*shape, dtype=dtype) for shape in ((1, 6144), (1, 2048), (1, taps, 2048)))
        prepared.append(gated_convolution(x, out, ring, torch.zeros(1, dtype=torch.int32), weights))
    return prepared


def layer_vectors() -> list[Prepared]:
    norm = RowNorm("RMS_WIDE", empty(256), None, 1e-6)
    weights = LayerInputWeights(empty(4, 1024), 16.0, norm, 256, 0.5)
    return [layer_inputs(torch.zeros(1, dtype=torch.int64), empty(1, 1024), empty(1, 1024), weights)]


def latents() -> list[list[Prepared]]:
    """The three kernels of latent attention, of DeepSeek-V3's heads, GLM-4.7-Flash's and MiniCPM3's."""
    prepared = []
    for heads, plain, value, latent, rotated, dtype, tile, stages in (
        (32, 128, 128, 512, 64, BFLOAT16, 32, 3),
        (24, 192, 256, 512, 64, HALF, 16, 2),
        (8, 64, 64, 256, 32, BFLOAT16, 32, 3),
    ):
        weights = LatentWeights(
            keys=empty(heads, latent, plain, dtype=dtype),
            values=empty(heads, value, latent, dtype=dtype),
            norm=RowNorm("RMS", empty(latent, dtype=dtype), None, 1e-6),
            table=torch.empty(32, rotated // 2, 2),
            interleaved=heads > 8,
        )
        division = LatentDivision(1, heads, tile, stages)
        workspace = LatentWorkspace.of(1, [(weights, division)], dtype)
        assert workspace is not None
        queries, cache = (
            empty(1, heads, latent + rotated, dtype=dtype),
            empty(1, 32, latent + rotated, dtype=dtype),
        )
        lengths, q = torch.zeros(1, dtype=torch.int32), empty(1, heads * (plain + rotated), dtype=dtype)
        prepared.append(
            [
                latent_queries(q, cache[:, 0], cache, lengths, weights, queries),
                latent_attend(queries, cache, lengths, weights, workspace, scale=1.0, division=division),
                latent_values(
                    empty(1, heads * value, dtype=dtype),
                    lengths,
                    weights,
                    workspace,
                    capacity=32,
                    division=division,
                ),
            ]
        )
    return prepared


def absorbing() -> list[Prepared]:
    return [each[0] for each in latents()]


def latent_attentions() -> list[Prepared]:
    return [each[1] for each in latents()]


def latent_results() -> list[Prepared]:
    return [each[2] for each in latents()]


def activations() -> list[Prepared]:
    return [
        activate(empty(1, 256), empty(1, 128), name, arrangement)
        for name, arrangement in (
            ("silu", "tiles"),
            ("gelu", "halves"),
            ("gelu_tanh", "tiles"),
            ("relu", "plain"),
            ("relu2", "plain"),
        )
    ]


def routers(*, clusters: bool = False) -> list[Prepared]:
    """Routers of given rows, and of rows that they make, up to the widest."""
    return [
        router(
            *(x, empty(experts, width, dtype=dtype)),
            torch.empty(1, top, dtype=torch.int32),
            torch.empty(1, top),
            scoring=scoring,
            normalised=True,
            correction=torch.empty(experts) if dtype == BFLOAT16 else None,
            groups=8 if dtype == BFLOAT16 else 1,
            kept=4 if dtype == BFLOAT16 else 1,
            zeroed=experts == 256,
            wide=scoring == "sigmoid",
            gate=empty(width, dtype=dtype) if scoring == "softmax" else None,
            gates=torch.empty(1, 1) if scoring == "softmax" else None,
            clusters=clusters,
            addition=None if norm is None else Addition(x, x, x, norm, 1.0),
        )
        for experts, width, top, dtype, scoring, norm in (
            (128, 2048, 8, HALF, "softmax", None),
            (256, 2048, 8, BFLOAT16, "sigmoid", None),
            (512, 2048, 16, BFLOAT16, "softmax", None),
            (128, 2048, 8, HALF, "softmax", RowNorm("RMS", None, None, 1e-5)),
            (512, ROUTER_WIDEST, 16, BFLOAT16, "sigmoid", RowNorm("LAYER", None, None, 1e-5)),
        )
        for x in (empty(1, width, dtype=dtype),)
    ]


def cluster_attentions() -> list[Prepared]:
    return attentions(clusters=True)


def cluster_routers() -> list[Prepared]:
    return routers(clusters=True)


KERNELS = (
    *(residuals, appends, attentions, runs, deltas, mambas, convolutions, activations, routers),
    *(layer_vectors, absorbing, latent_attentions, latent_results),
)
CLUSTERED = (cluster_attentions, cluster_routers)


def kernels(architecture: str) -> list[list[Instantiation]]:
    """Every kernel's variants on ``architecture``, which has clusters of blocks from 9.0 on."""
    clusters = int(re.sub(r"\D", "", architecture)) >= 90
    listed = [kernel() for kernel in (*KERNELS, *(CLUSTERED if clusters else ()))]
    return [list(dict.fromkeys(prepared.instantiation for prepared in variants)) for variants in listed]


def compile_without_spills(chosen: list[Instantiation], architecture: str) -> None:
    named = tuple((f"kernel_{number}", instantiation) for number, instantiation in enumerate(chosen))
    compiled = compile_text(unit(named), "between products", architecture)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), compiled.log


@pytest.mark.parametrize("architecture", QUICK)
def test_every_kernel_compiles(architecture: str) -> None:
    """One variant of each kernel, another one on each architecture."""
    place = ARCHITECTURES.index(architecture)
    compile_without_spills([each[place % len(each)] for each in kernels(architecture)], architecture)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_delta_nets_that_make_rates_have_no_spills(architecture: str) -> None:
    """Their threads need all 128 registers, which a sum in another order can exceed."""
    chosen = [each.instantiation for each in deltas_of(DELTAS_WITH_RATES)]
    compile_without_spills(chosen, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_on_any_architecture(architecture: str) -> None:
    for variants in kernels(architecture):
        compile_without_spills(variants, architecture)


def test_spills_would_be_found() -> None:
    crowded = next(
        prepared.instantiation
        for prepared in attentions()
        if prepared.threads == 128 and dict(prepared.instantiation.parameters)["D"] == 128
    )
    parameters = dict(crowded.parameters) | {"MIN_BLOCKS": 12}
    instantiation = Instantiation(crowded.header, crowded.function, tuple(parameters.items()))
    assert compile_text(instantiation.text(), "crowded", "sm_90a").spill_bytes
