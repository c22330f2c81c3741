"""Attention of a decode step on the emulation."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, Memory, apart
from marlinq.kernels.step import AttentionShape, AttentionWorkspace, Division, HeadWork, attend
from tests.emulation.step import (
    DTYPES,
    constants,
    given,
    head_norm,
    poisoned,
    results,
    start,
    strided,
    weights_of,
)
from tests.kernels.step_problems import (
    BOUND,
    expected_attention,
    expected_factors,
    expected_heads,
    random,
    relative_error,
    rotation_table,
)
from tests.testing.pairs import in_turn

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


def read_and_written(
    x: Tensor,
    out: Tensor,
    work: HeadWork,
    workspace: AttentionWorkspace,
    *,
    lengths: Tensor,
    sinks: Tensor | None = None,
) -> list[Memory]:
    """All memory of a launch besides the caches."""
    return [
        *given(x=x),
        *constants(table=work.table, lengths=lengths, sinks=sinks),
        *weights_of("query norm's", work.query_norm),
        *weights_of("key norm's", work.key_norm),
        *results(out=out, partials=workspace.partials),
        Memory("counters", workspace.counters, writable=True, after_previous=True, flags=True),
    ]


def caches(keys: Tensor, values: Tensor) -> list[Memory]:
    """Caches of which earlier kernels of the step have written nothing."""
    return [
        Memory("keys", keys, writable=True, holds_values=True),
        Memory("values", values, writable=True, holds_values=True),
    ]


@pytest.mark.parametrize(("case", "dtype"), in_turn(CACHES, DTYPES), ids=str)
def test_attention(builder: Builder, case: tuple[Any, ...], dtype: torch.dtype) -> None:
    numbers, warps, channels, interleaved, kind, wide = case
    heads, kv, size, lengths, splits, window, softcap = numbers
    torch.manual_seed(size + splits)
    batch, capacity = len(lengths), max(lengths) + 2
    columns = (heads + 2 * kv) * size
    sinks = apart(torch.linspace(-2, 4, heads)) if kind is None else None
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
    made = AttentionWorkspace.of([(shape, divided)], torch.device("cpu"))
    counters = apart(made.counters)
    found = []
    runs = [(divided, 1), (divided, 4)]
    if splits > 1:
        runs.append((divided._replace(meets=True), 1))
    for division, resident in runs:
        keys, values = (apart(cache) for cache in filled)
        out = poisoned(batch, heads, size, dtype=dtype)
        workspace = AttentionWorkspace(apart(made.partials.fill_(torch.nan)), counters)
        prepared = attend(
            *(x, keys, values, out, counted, work, workspace),
            scale=size**-0.5,
            division=division,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        memory = [
            *read_and_written(x, out, work, workspace, lengths=counted, sinks=sinks),
            *caches(keys, values),
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
        *(q.to(dtype), *filled, counted),
        scale=size**-0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    assert relative_error(found[0], expected) < BOUND[dtype]
    assert all(torch.equal(out, found[0]) for out in found), "how splits meet, or when, shows in the bits"


# D, cached tokens, rows, splits, shared; heads of more than 256 channels are taken in slices.
OTHER_HEADS = [(512, 70, 1, 3, False), (320, 45, 1, 1, True), (264, 20, 3, 2, False), (64, 40, 3, 2, True)]


@pytest.mark.parametrize(("case", "dtype"), in_turn(OTHER_HEADS, DTYPES), ids=str)
def test_values_that_are_keys_and_keys_of_another_layer(
    builder: Builder, case: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> None:
    size, length, rows, splits, shared = case
    torch.manual_seed(size)
    heads, capacity = 3, length + rows
    table = apart(rotation_table(capacity, size))
    norms = [head_norm("RMS_WIDE", size, 1, dtype, wide=False) for _ in range(2)]
    work = HeadWork(
        table=table,
        query_norm=norms[0],
        key_norm=None if shared else norms[1],
        value_eps=None if shared else 0.25,
        keys_are_values=not shared,
        shared=shared,
    )
    x = strided(rows, (heads + work.keys_and_values) * size, 5 * size, dtype)
    lengths = apart(torch.arange(length, length + rows, dtype=torch.int32))
    q, *new = expected_heads(x, heads, 1, size, lengths.long(), work)
    filled = [random(1, 1, capacity, size, dtype=dtype) for _ in range(2)]
    whole = [cache.clone() for cache in filled]
    if not shared:
        for cache, begun, made in zip(whole, filled, new, strict=True):
            cache[0, :, length:] = made.to(dtype).transpose(0, 1)
            begun[:, :, length:] = torch.nan
    keys, values = (apart(cache) for cache in filled)
    division = Division(splits)
    room = AttentionWorkspace.of(
        [(AttentionShape(rows, heads, 1, size, capacity), division)], torch.device("cpu")
    )
    workspace = AttentionWorkspace(apart(room.partials), apart(room.counters))
    out = poisoned(rows, heads, size, dtype=dtype)
    prepared = attend(
        *(x, keys, values, out, lengths, work, workspace),
        scale=size**-0.5,
        division=division,
        together=rows > 1,
    )
    memory = read_and_written(x, out, work, workspace, lengths=lengths)
    if shared:
        for name, cache in (("keys", keys), ("values", values)):
            # An earlier kernel of the step has written the new tokens'.
            memory += [
                Memory(name, cache[0, 0, :length]),
                Memory(f"new {name}", cache[0, 0, length:], after_previous=True),
            ]
    else:
        memory += caches(keys, values)
    start(builder, prepared, memory, seed=size, resident=2)
    expected = expected_attention(
        q.to(dtype),
        *(cache.expand(rows, -1, -1, -1) for cache in whole),
        lengths,
        scale=size**-0.5,
        window=None,
        softcap=None,
    )
    assert relative_error(out, expected) < BOUND[dtype]
    for found, wanted in zip((keys, values), whole, strict=True):
        assert relative_error(found, wanted.double()) < BOUND[dtype]


# (heads, kv_heads, D, cached tokens, rows, splits, window, softcap), warps, rotated channels, norm, gates
TOGETHER = [
    ((4, 2, 64, 0, 3, 1, None, None), 4, 64, "RMS", "queries"),
    ((12, 1, 32, 93, 8, 2, None, None), 4, 16, None, "queries"),
    ((2, 2, 80, 127, 4, 3, 40, 9.0), 4, 32, "LAYER", "none"),
    ((3, 1, 16, 62, 5, 2, 2, None), 4, 0, None, "none"),
    ((12, 2, 32, 30, 2, 2, None, None), 4, 16, "RMS", "channels"),
    ((8, 2, 16, 3, 3, 1, None, None), 4, 16, "RMS_WIDE", "heads"),
    ((6, 1, 64, 40, 1, 2, None, None), 4, 64, "RMS", "heads"),
]


@pytest.mark.parametrize(("case", "dtype"), in_turn(TOGETHER, DTYPES), ids=str)
def test_neighbouring_tokens_of_one_sequence(
    builder: Builder, case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    (heads, kv, size, length, rows, splits, window, softcap), warps, channels, kind, gates = case
    torch.manual_seed(size)
    capacity, gated = length + rows, gates != "none"
    own = {"channels": heads * size, "heads": -(-heads // 8) * 8}.get(gates, 0)
    columns = ((1 + (gates == "queries")) * heads + 2 * kv) * size
    sinks = None if gated else apart(torch.linspace(-2, 4, heads))
    x = strided(rows, columns + own, columns + own + 64, dtype)
    plain = x[:, :columns]
    if gates == "queries":
        pairs = x[:, : 2 * heads * size].reshape(rows, heads, 2, size)
        plain = torch.cat((pairs[:, :, 0].flatten(1), x[:, 2 * heads * size :]), 1)
    table = apart(rotation_table(capacity, channels)) if channels else None
    norms = [head_norm(kind, size, count, dtype, wide=False) for count in (heads, kv)]
    work = HeadWork(
        table=table,
        query_norm=norms[0],
        key_norm=norms[1],
        gates=gates,
        softplus=gates == "channels",
        norms_behind=own > 0,
    )
    filled = [random(1, kv, capacity, size, dtype=dtype) for _ in range(2)]
    for cache in filled:
        cache[:, :, length:] = torch.nan
    lengths = apart(torch.arange(length, length + rows, dtype=torch.int32))
    shape = AttentionShape(rows, heads, kv, size, capacity)
    q, *new = expected_heads(plain, heads, kv, size, lengths.long(), work)
    whole = [cache.clone() for cache in filled]
    for cache, heads_of in zip(whole, new, strict=True):
        cache[0, :, length:] = heads_of.to(dtype).transpose(0, 1)
    expected = expected_attention(
        q.to(dtype),
        *(cache.expand(rows, -1, -1, -1) for cache in whole),
        lengths,
        scale=size**-0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    for meets in (False, True)[: 1 if splits == 1 else 2]:
        division = Division(splits, warps, meets)
        made = AttentionWorkspace.of([(shape, division)], torch.device("cpu"))
        workspace = AttentionWorkspace(apart(made.partials), apart(made.counters))
        keys, values = (apart(cache) for cache in filled)
        out = poisoned(rows, heads, size, dtype=dtype)
        prepared = attend(
            *(x, keys, values, out, lengths, work, workspace),
            scale=size**-0.5,
            division=division,
            window=window,
            softcap=softcap,
            sinks=sinks,
            together=True,
        )
        memory = [
            *read_and_written(x, out, work, workspace, lengths=lengths, sinks=sinks),
            *caches(keys, values),
        ]
        start(builder, prepared, memory, seed=size)
        assert relative_error(out, expected_factors(x, out, kv, work) * expected) < BOUND[dtype]
        for found, wanted in zip((keys, values), whole, strict=True):
            assert relative_error(found, wanted.double()) < BOUND[dtype]


FAULTS = {
    "no wait for the product": (Planted("attention_waits"), "griddepcontrol.wait"),
    "heads not waited for": (Planted("heads_there"), "without waiting for it|still be reading"),
    "other warps' outputs not waited for": (
        Planted("warps_there"),
        "without waiting for it|still be reading",
    ),
    "the newest token not attended to": (Planted("newest_token", "tile < 0"), "wrong"),
    "a cluster that does not meet": (Planted("splits_met"), "without waiting"),
    "a block that leaves before it has been read": (Planted("splits_read"), "which has ended"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(builder: Builder, name: str) -> None:
    planted, reported = FAULTS[name]
    torch.manual_seed(0)
    dtype, size, length = torch.float16, 64, 200
    x, out = apart(random(1, 4 * size, dtype=dtype)), poisoned(1, 2, size, dtype=dtype)
    keys, values = (apart(random(1, 1, length + 1, size, dtype=dtype)) for _ in range(2))
    for cache in (keys, values):
        cache[:, :, length] = torch.nan
    lengths = apart(torch.tensor([length], dtype=torch.int32))
    division = Division(3, meets=True)
    made = AttentionWorkspace.of([(AttentionShape(1, 2, 1, size, length + 1), division)], torch.device("cpu"))
    workspace = AttentionWorkspace(apart(made.partials), apart(made.counters))
    prepared = attend(x, keys, values, out, lengths, HeadWork(), workspace, scale=0.125, division=division)
    memory = [*read_and_written(x, out, HeadWork(), workspace, lengths=lengths), *caches(keys, values)]
    q, *new = expected_heads(x, 2, 1, size, lengths.long(), HeadWork())
    whole = [cache.clone() for cache in (keys, values)]
    for cache, fresh in zip(whole, new, strict=True):
        cache[:, :, length] = fresh.to(dtype)
    expected = expected_attention(q.to(dtype), *whole, lengths, scale=0.125, window=None, softcap=None)
    found = "nothing"
    for seed in range(4):
        try:
            start(builder, prepared, memory, seed=seed, planted=planted)
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
    made = AttentionWorkspace.of([(AttentionShape(2, 1, 1, size, 40), division)], torch.device("cpu"))
    workspace = AttentionWorkspace(apart(made.partials), apart(made.counters))
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
    made = AttentionWorkspace.of([(shape, division)], torch.device("cpu"))
    workspace = AttentionWorkspace(apart(made.partials), apart(made.counters))
    prepared = attend(x, keys, values, out, lengths, HeadWork(), workspace, scale=0.125, division=division)
    memory = [
        *given(x=x, lengths=lengths),
        Memory("keys", keys, writable=True, holds_values=True),
        Memory("values", values, writable=True, holds_values=True),
        *results(out=out, partials=workspace.partials),
        Memory("counters", workspace.counters, writable=True, flags=True),
    ]
    start(builder, prepared, memory, capability=86, resident=2)
