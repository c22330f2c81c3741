"""The kernels between products on a GPU, against float64, launched one behind the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.kernels.step import (
    AttentionShape,
    AttentionWorkspace,
    Division,
    Gather,
    HeadNorm,
    HeadWork,
    Prepared,
    RowNorm,
    activate,
    append,
    attend,
    bind,
    divide,
    residual,
    router,
)
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

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16)


def made(*shape: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
    return random(*shape, dtype=dtype, size=size).cuda()


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def start(prepared: Prepared, *, dependent: bool = True) -> None:
    bind(prepared, torch.cuda.current_device(), dependent=dependent).start()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 3, 64, 2049])
@pytest.mark.parametrize("width", [64, 576, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("kind", ["RMS", "RMS_WIDE", "LAYER"])
def test_residual_stream_and_norm(kind: Any, width: int, m: int, dtype: torch.dtype) -> None:
    x, first, second = (made(m, width, dtype=dtype) for _ in range(3))
    stored, out = poisoned(m, width, dtype=dtype), poisoned(m, width, dtype=dtype)
    norm = RowNorm(kind, made(width, dtype=dtype), made(width, dtype=dtype), 0.25)
    start(residual(x, stored=stored, out=out, norm=norm, first=first, second=second, factor=0.5))
    assert relative_error(stored, x.double() + 0.5 * (first.double() + second.double())) < BOUND[dtype]
    assert relative_error(out, expected_norm(stored.double(), norm)) < BOUND[dtype]


def test_embeddings_and_lengths() -> None:
    dtype = torch.float16
    table, positions = made(1000, 4096, dtype=dtype), made(70, 4096, dtype=dtype)
    tokens = torch.randint(0, 1000, (6,), device="cuda")
    lengths = torch.tensor([3, 60], dtype=torch.int32, device="cuda")
    stored = poisoned(6, 4096, dtype=dtype)
    gather = Gather(tokens, table, 2.0, positions, positions_offset=2)
    counter = lengths.clone()
    start(residual(gather, stored=stored, lengths=lengths, tokens_each=3, counter=counter))
    places = torch.tensor([5, 6, 7, 62, 63, 64], device="cuda")
    assert relative_error(stored, 2.0 * table[tokens].double() + positions[places].double()) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 300])
@pytest.mark.parametrize(
    ("experts", "width", "top", "scoring"),
    [(60, 2048, 4, "softmax"), (128, 2048, 8, "sigmoid"), (512, 4096, 10, "softmax"), (8, 64, 2, "softmax")],
)
@pytest.mark.parametrize("correction", ["none", "plain", "groups", "zeroed"])
def test_routers(
    correction: str, experts: int, width: int, top: int, scoring: str, m: int, dtype: torch.dtype
) -> None:
    # Eighths, of which sums are exact, so that rounding exchanges nothing.
    x, weight, gate = (
        (2 * torch.randn(*shape)).round().clamp(-3, 3).cuda()
        for shape in ((m, width), (experts, width), (width,))
    )
    x, weight, gate = x.to(dtype), (weight / 128).to(dtype), (gate / 128).to(dtype)
    corrected, grouped = correction != "none", correction in ("groups", "zeroed")
    groups, kept = (4, 2) if grouped else (1, 1)
    # Experts left out with a score of zero come first where all others are negative.
    low = 2.0 if correction == "zeroed" else 0.0
    added = torch.rand(experts, device="cuda") / (1 if scoring == "sigmoid" else experts) - low
    ids = torch.full((m, top), -1, dtype=torch.int32, device="cuda")
    weights, gates = poisoned(m, top, dtype=torch.float32), poisoned(m, 1, dtype=torch.float32)
    start(
        router(
            *(x, weight, ids, weights),
            scoring=scoring,
            normalised=True,
            scale=2.5,
            correction=added if corrected else None,
            groups=groups,
            kept=kept,
            zeroed=correction == "zeroed",
            wide=corrected,
            gate=gate,
            gates=gates,
        )
    )
    rounding = torch.float32 if corrected else dtype
    logits = (x.double() @ weight.double().T).to(rounding).double()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    decisive = scores + added.double() if corrected else logits
    if grouped:
        decisive = expected_groups(decisive, groups, kept, zeroed=correction == "zeroed")
    taken = (-decisive).sort(dim=-1, stable=True).indices[:, :top]
    if corrected:
        # Float32 may exchange experts whose decisive numbers it can't tell apart.
        found = decisive.gather(1, ids.long())
        assert float((found - decisive.gather(1, taken)).abs().max()) < 1e-6
        assert (ids.long() == taken).float().mean() > 0.99
        taken = ids.long()
    assert torch.equal(ids.long(), taken)
    expected = scores.gather(1, taken)
    # A few hundred terms of float32 and exponentials of 2 ulp.
    assert relative_error(weights, 2.5 * expected / expected.sum(-1, keepdim=True)) < 2e-6
    expected_gates = (x.double() @ gate.double()).to(rounding).double().sigmoid()
    assert relative_error(gates, expected_gates[:, None]) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("m", [1, 5, 2049])
def test_activations(m: int, name: str, dtype: torch.dtype) -> None:
    x = made(m, 2 * 1536, dtype=dtype, size=3.0)
    out = poisoned(m, 1536, dtype=dtype)
    start(activate(x, out, name, "tiles"))
    gate, up = (part.flatten(1) for part in x.double().unflatten(1, (-1, 2, 64)).unbind(2))
    assert relative_error(out, expected_activation(name, gate) * up) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "size"), [(32, 8, 128), (9, 3, 64), (8, 4, 256), (32, 32, 80)])
@pytest.mark.parametrize("tokens_each", [1, 77])
def test_rotation_and_cache(tokens_each: int, heads: int, kv: int, size: int, dtype: torch.dtype) -> None:
    batch, capacity = 3, 200
    m = batch * tokens_each
    x = made(m, (heads + 2 * kv) * size, dtype=dtype)
    norm = HeadNorm("RMS", made(size, dtype=dtype), None, 0.25)
    work = HeadWork(table=rotation_table(capacity, size).cuda(), key_norm=norm)
    lengths = torch.tensor([0, 100, 31], dtype=torch.int32, device="cuda")
    q = poisoned(m, heads, size, dtype=dtype)
    keys, values = (poisoned(batch, kv, capacity, size, dtype=dtype) for _ in range(2))
    start(append(x, q, keys, values, lengths, work, tokens_each=tokens_each))
    sequences = torch.arange(batch, device="cuda").repeat_interleave(tokens_each)
    positions = lengths.long()[sequences] + torch.arange(tokens_each, device="cuda").repeat(batch)
    wanted = expected_heads(x, heads, kv, size, positions, work)
    assert relative_error(q, wanted[0]) < BOUND[dtype]
    assert relative_error(keys[sequences, :, positions], wanted[1]) < BOUND[dtype]
    assert torch.equal(values[sequences, :, positions].double(), wanted[2])


SHAPES = [(32, 8, 128), (9, 3, 64), (8, 4, 256), (32, 32, 80), (48, 1, 128), (16, 2, 96)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "size"), SHAPES)
@pytest.mark.parametrize("batch", [1, 5, 16, 64])
def test_attention(batch: int, heads: int, kv: int, size: int, dtype: torch.dtype) -> None:
    capacity = 1500
    lengths = torch.randint(0, capacity, (batch,), dtype=torch.int32, device="cuda")
    lengths[0] = capacity - 1
    x = made(batch, (heads + 2 * kv) * size, dtype=dtype, size=1.5)
    filled = [made(batch, kv, capacity, size, dtype=dtype) for _ in range(2)]
    norm = HeadNorm("RMS_WIDE", made(size, dtype=dtype), None, 1e-6, 1.0) if kv in (1, 4) else None
    table = rotation_table(capacity, size).cuda()
    work = HeadWork(table=table, query_norm=norm, key_norm=norm)
    places = torch.arange(batch, device="cuda"), slice(None), lengths.long()
    for cache in filled:
        cache[places] = torch.nan
    q, new_keys, new_values = expected_heads(x, heads, kv, size, lengths.long(), work)
    shape = AttentionShape(batch, heads, kv, size, capacity)
    clusters = torch.cuda.get_device_capability() >= (9, 0)
    chosen = divide(shape, torch.cuda.get_device_properties(0).multi_processor_count, clusters=clusters)
    divisions = {chosen, Division(3), Division(11, warps=8)}
    if clusters:
        divisions |= {Division(3, meets=True), Division(5, warps=8, meets=True)}
    whole = [cache.clone() for cache in filled]
    for cache, new in zip(whole, (new_keys, new_values), strict=True):
        cache[places] = new.to(dtype)
    for division, (window, softcap) in itertools.product(divisions, ((None, None), (700, 30.0))):
        workspace = AttentionWorkspace.of([(shape, division)], torch.device("cuda"))
        expected = expected_attention(
            q.to(dtype), *whole, lengths, scale=size**-0.5, window=window, softcap=softcap
        )
        first = None
        for _ in range(3):
            out = poisoned(batch, heads, size, dtype=dtype)
            keys, values = (cache.clone() for cache in filled)
            prepared = attend(
                *(x, keys, values, out, lengths, work, workspace),
                scale=size**-0.5,
                division=division,
                window=window,
                softcap=softcap,
            )
            start(prepared)
            assert relative_error(out, expected) < BOUND[dtype], division
            assert relative_error(keys, whole[0]) < BOUND[dtype]
            assert torch.equal(values, whole[1])
            first = out if first is None else first
            assert torch.equal(out, first), "other bits in another launch"
        assert not workspace.counters.any()
