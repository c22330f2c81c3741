"""Rotary embedding, norms of heads and the cache on the emulation."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from emulation.build import Builder
from emulation.launching import apart
from marlinq.kernels.step import HeadWork, append
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
from tests.kernels.step_problems import BOUND, expected_heads, random, relative_error, rotation_table
from tests.testing.pairs import every_value

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


@pytest.mark.parametrize(("shape", "tokens_each", "dtype"), every_value(list(product(HEADS, (1, 3), DTYPES))))
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
    work = HeadWork(
        table=table,
        interleaved=interleaved,
        query_norm=norms[0],
        key_norm=norms[1],
        turns=turns,
        norms_behind=interleaved and kind is not None,
    )
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


@pytest.mark.parametrize("shared", [False, True])
def test_values_that_are_keys_and_keys_of_another_layer(builder: Builder, shared: bool) -> None:
    dtype, size, tokens = torch.float16, 272, 2
    torch.manual_seed(size)
    x = strided(tokens, (3 if shared else 4) * size, 5 * size, dtype)
    norm, table = head_norm("RMS_WIDE", size, 1, dtype, wide=False), apart(rotation_table(9, size))
    work = HeadWork(
        table=table,
        query_norm=norm,
        key_norm=None if shared else norm,
        value_eps=None if shared else 0.25,
        keys_are_values=not shared,
        shared=shared,
    )
    lengths = apart(torch.tensor([5], dtype=torch.int32))
    q = poisoned(tokens, 3, size, dtype=dtype)
    keys, values = (poisoned(1, 1, 9, size, dtype=dtype) for _ in range(2))
    memory = [
        *given(x=x, lengths=lengths),
        *constants(table=table),
        *weights_of("norm's", norm),
        *results(q=q, keys=keys, values=values),
    ]
    start(builder, append(x, q, keys, values, lengths, work, tokens_each=tokens), memory)
    wanted = expected_heads(x, 3, 1, size, torch.arange(5, 5 + tokens), work)
    assert relative_error(q, wanted[0]) < BOUND[dtype]
    if not shared:
        for cache, expected in ((keys, wanted[1]), (values, wanted[2])):
            assert relative_error(cache[0, :, 5 : 5 + tokens].transpose(0, 1), expected) < BOUND[dtype]
    written = 0 if shared else tokens * size
    assert int(values.isnan().logical_not().sum()) == int(keys.isnan().logical_not().sum()) == written


def test_a_full_cache_takes_nothing(builder: Builder) -> None:
    x = apart(random(2, 3 * 16, dtype=torch.float16))
    lengths = apart(torch.tensor([4, 3], dtype=torch.int32))
    q = poisoned(2, 1, 16, dtype=torch.float16)
    keys, values = (poisoned(2, 1, 4, 16, dtype=torch.float16) for _ in range(2))
    memory = [*given(x=x, lengths=lengths), *results(q=q, keys=keys, values=values)]
    start(builder, append(x, q, keys, values, lengths, HeadWork()), memory)
    assert torch.equal(keys[1, 0, 3], x[1, 16:32])
    assert int(keys.isnan().logical_not().sum()) == 16
