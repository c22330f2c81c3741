"""The kernels between products in plain torch, with the functions of :mod:`marlinq.kernels.step`.

A prepared launch is a closure over its tensors. Sums are taken in float64 and rounded where they are stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.step import (
    Addition,
    Arrangement,
    AttentionWorkspace,
    ConvolutionWeights,
    DeltaWeights,
    Division,
    Gather,
    HeadWork,
    LatentDivision,
    LatentWeights,
    LatentWorkspace,
    LayerInputWeights,
    MambaWeights,
    MambaWorkspace,
    RoutedRows,
    RowNorm,
)
from tests.kernels.step_problems import (
    expected_activation,
    expected_attention,
    expected_convolution,
    expected_delta,
    expected_delta_run,
    expected_factors,
    expected_groups,
    expected_latent,
    expected_latent_queries,
    expected_latent_rows,
    expected_layer_inputs,
    expected_mamba,
    expected_norm,
    expected_rotation,
)

__all__ = [
    "Arrangement",
    "activate",
    "append",
    "attend",
    "bind",
    "delta",
    "gated_convolution",
    "latent_attend",
    "latent_queries",
    "latent_values",
    "layer_inputs",
    "mamba",
    "precompile_prepared",
    "residual",
    "router",
]


@dataclass
class Prepared:
    """Stands for a launch: prepared, and bound as well."""

    action: Callable[[Prepared], None]
    arguments: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(tokens=0))

    def start(self) -> None:
        self.action(self)


def bind(prepared: Prepared, device_index: int, *, dependent: bool) -> Prepared:
    return prepared


def precompile_prepared(
    wanted: Iterable[Prepared], device_index: int, progress: ReportProgress = no_progress
) -> int:
    return 0


def residual(
    source: Tensor | Gather,
    *,
    stored: Tensor | None = None,
    out: Tensor | None = None,
    norm: RowNorm | None = None,
    first: Tensor | RoutedRows | None = None,
    second: Tensor | None = None,
    gates: Tensor | None = None,
    own: tuple[RowNorm, RowNorm] | None = None,
    post: RowNorm | None = None,
    further: Sequence[tuple[RowNorm, Tensor]] = (),
    factor: float = 1.0,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    tokens_each: int = 1,
    counter: Tensor | None = None,
    kept: Tensor | None = None,
) -> Prepared:
    def run(launch: Prepared) -> None:
        if isinstance(source, Gather):
            tokens = _tokens(launch, source.tokens)
            dtype = source.embedding.dtype
            x = (source.embedding[tokens] * source.scale).double()
            if source.positions is not None:
                assert lengths is not None
                places = _positions(lengths, len(tokens), tokens_each) + source.positions_offset
                x = x + source.positions[places].double()
        else:
            x, dtype = source.double(), source.dtype
        if first is not None:
            assert isinstance(first, Tensor)
            addends = [each.double()[:, : x.shape[1]] for each in (first, second) if each is not None]
            if own is not None:
                addends = [expected_norm(each, norm) for each, norm in zip(addends, own, strict=True)]
            if second is not None and gates is not None:
                addends[1] = gates.double() * addends[1]
            total = sum(addends, torch.zeros(()))
            x = x + factor * (total if post is None else expected_norm(total, post))
        x = scale * x
        x = x.to(dtype)
        if stored is not None:
            stored.copy_(x)
        if norm is not None:
            assert out is not None
            out.copy_(expected_norm(x.double(), norm))
            if kept is not None:
                assert counter is not None
                kept[counter.long()] = out
        for each, result in further:
            result.copy_(expected_norm(x.double(), each))
        if counter is not None:
            counter.add_(1)

    return Prepared(run)


def _tokens(launch: Prepared, tokens: Tensor) -> Tensor:
    """The tokens at the address that the launch was given last, else ``tokens``."""
    if not launch.arguments.tokens:
        return tokens
    return torch.tensor(list((ctypes.c_int64 * len(tokens)).from_address(launch.arguments.tokens)))


def _positions(lengths: Tensor, rows: int, tokens_each: int) -> Tensor:
    new = torch.arange(tokens_each).repeat(rows // tokens_each)
    return lengths.long().repeat_interleave(tokens_each) + new


def activate(
    x: Tensor,
    out: Tensor,
    activation: str,
    arrangement: Arrangement,
    scale: float = 1.0,
    up: Tensor | None = None,
) -> Prepared:
    def run(_: Prepared) -> None:
        columns = out.shape[1]
        wide = x.double()
        if arrangement == "tiles":
            gate, other = (part.flatten(1) for part in wide.unflatten(1, (-1, 2, 64)).unbind(2))
        elif arrangement == "halves":
            gate, other = wide[:, :columns], wide[:, columns : 2 * columns]
        else:
            gate, other = wide[:, :columns], torch.ones(()) if up is None else up.double()
        out.copy_(expected_activation(activation, scale * gate) * other)

    return Prepared(run)


def append(
    x: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    work: HeadWork,
    *,
    tokens_each: int = 1,
) -> Prepared:
    table, interleaved, turns = work.table, work.interleaved, work.turns

    def run(_: Prepared) -> None:
        m, heads, size = q.shape
        kv = keys.shape[1]
        each = work.heads_each
        others = work.keys_and_values
        runs = x.double()[:, : (each * heads + others * kv) * size].reshape(m, turns, -1, size)
        counts = (each * heads // turns, *((kv // turns,) * others))
        parts = [part.reshape(m, -1, size) for part in runs.split(counts, 2)]
        parts[0] = parts[0][:, ::each]
        if others == 1:
            parts.append(parts[1])
        positions = _positions(lengths, m, tokens_each)
        for index, norm in enumerate((work.query_norm, work.key_norm)):
            if index == len(parts):
                break
            part = parts[index]
            if table is not None and work.norms_behind:
                part = expected_rotation(part, table, positions, interleaved=interleaved)
            if norm is not None:
                rows = part.flatten(1) if norm.wide else part
                if norm.weight is not None and not norm.wide and norm.weight.numel() != size:
                    raise NotImplementedError("weights of each head")
                part = expected_norm(rows, norm).view(part.shape)
            if table is not None and not work.norms_behind:
                part = expected_rotation(part, table, positions, interleaved=interleaved)
            parts[index] = part
        sequences = torch.arange(keys.shape[0]).repeat_interleave(tokens_each)
        q.copy_(parts[0])
        if work.shared:
            return
        if work.value_eps is not None:
            parts[2] = expected_norm(parts[2], RowNorm("RMS_WIDE", None, None, work.value_eps))
        keys[sequences, :, positions] = parts[1].to(keys.dtype)
        values[sequences, :, positions] = parts[2].to(values.dtype)

    return Prepared(run)


def attend(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lengths: Tensor,
    work: HeadWork,
    workspace: AttentionWorkspace,
    *,
    scale: float,
    division: Division,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    together: bool = False,
) -> Prepared:
    def run(launch: Prepared) -> None:
        q = torch.empty_like(out)
        before, each = (lengths[:1], out.shape[0]) if together else (lengths, 1)
        append(x, q, keys, values, before, work, tokens_each=each).action(launch)
        seen = (cache.expand(out.shape[0], -1, -1, -1) for cache in (keys, values))
        mixed = expected_attention(
            q, *seen, lengths, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        out.copy_(mixed * expected_factors(x, out, keys.shape[1], work))

    return Prepared(run)


def latent_queries(
    q: Tensor, latent: Tensor, cache: Tensor, lengths: Tensor, weights: LatentWeights, queries: Tensor
) -> Prepared:
    def run(_: Prepared) -> None:
        queries.copy_(expected_latent_queries(q, lengths, weights))
        new = expected_latent_rows(latent, lengths, weights).to(cache.dtype)
        for m, length in enumerate(lengths.tolist()):
            cache[m % len(cache), length] = new[m]

    return Prepared(run)


def latent_attend(
    queries: Tensor,
    cache: Tensor,
    lengths: Tensor,
    weights: LatentWeights,
    workspace: LatentWorkspace,
    *,
    scale: float,
    division: LatentDivision,
) -> Prepared:
    """The whole result, left in the memory of the sums for :func:`latent_values`."""

    def run(_: Prepared) -> None:
        found = expected_latent(queries, cache, lengths, weights, scale).flatten()
        workspace.sums[: found.numel()] = found

    return Prepared(run)


def latent_values(
    out: Tensor,
    lengths: Tensor,
    weights: LatentWeights,
    workspace: LatentWorkspace,
    *,
    capacity: int,
    division: LatentDivision,
) -> Prepared:
    return Prepared(lambda _: out.copy_(workspace.sums[: out.numel()].view(out.shape)))


def delta(
    x: Tensor,
    rates: Tensor,
    out: Tensor,
    ring: Tensor,
    state: Tensor,
    lengths: Tensor,
    weights: DeltaWeights,
    *,
    states: Tensor | None = None,
    second: tuple[Tensor, Tensor] | None = None,
) -> Prepared:
    def run(_: Prepared) -> None:
        expected = expected_delta if states is None else expected_delta_run
        mixed, last, kept = expected(x, rates, ring, state, lengths, weights, second)
        out.copy_(mixed)
        (state if states is None else states).copy_(last)
        ring.copy_(kept)

    return Prepared(run)


def layer_inputs(tokens: Tensor, x: Tensor, out: Tensor, weights: LayerInputWeights) -> Prepared:
    def run(launch: Prepared) -> None:
        out.copy_(expected_layer_inputs(_tokens(launch, tokens), x, weights))

    return Prepared(run, SimpleNamespace(tokens=tokens.data_ptr()))


def gated_convolution(
    x: Tensor, out: Tensor, ring: Tensor, lengths: Tensor, weights: ConvolutionWeights
) -> Prepared:
    def run(_: Prepared) -> None:
        mixed, kept = expected_convolution(x, ring, lengths, weights)
        out.copy_(mixed)
        ring.copy_(kept)

    return Prepared(run)


def mamba(
    x: Tensor,
    out: Tensor,
    ring: Tensor,
    state: Tensor,
    lengths: Tensor,
    weights: MambaWeights,
    workspace: MambaWorkspace,
) -> Prepared:
    def run(_: Prepared) -> None:
        mixed, last, kept = expected_mamba(x, ring, state, lengths, weights)
        out.copy_(mixed)
        state.copy_(last)
        ring.copy_(kept)

    return Prepared(run)


def router(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    scoring: str,
    normalised: bool,
    scale: float = 1.0,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    corrects_logits: bool = False,
    factors: Tensor | None = None,
    groups: int = 1,
    kept: int = 1,
    zeroed: bool = False,
    wide: bool = False,
    gate: Tensor | None = None,
    gates: Tensor | None = None,
    shared: int = 0,
    clusters: bool = True,
    addition: Addition | None = None,
) -> Prepared:
    def run(launch: Prepared) -> None:
        if addition is not None:
            residual(
                addition.source,
                stored=addition.stored,
                out=x,
                norm=addition.norm,
                first=addition.first,
                factor=addition.factor,
            ).action(launch)
        rounding = torch.float32 if wide else x.dtype
        added = 0.0 if bias is None else bias.double()
        logits = (x.double() @ weight.double().T + added).to(rounding).double()
        scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
        decisive = logits
        if correction is not None:
            decisive = (logits if corrects_logits else scores) + correction
        if groups > 1:
            summed = 1 if correction is None else 2
            decisive = expected_groups(decisive, groups, kept, zeroed=zeroed, summed=summed)
        top = ids.shape[1] - shared
        taken = (-decisive).sort(dim=-1, stable=True).indices[:, :top]
        found = scores.gather(1, taken)
        ids[:, :top] = taken
        ids[:, top:] = len(weight) + torch.arange(shared)
        found = scale * (found / found.sum(-1, keepdim=True) if normalised else found)
        weights[:, :top] = found if factors is None else found * factors[taken]
        weights[:, top:] = 1.0
        if gate is not None:
            (weights[:, top:] if gates is None else gates)[:] = (
                (x.double() @ gate.double()[:, None]).to(rounding).double().sigmoid()
            )

    return Prepared(run)
