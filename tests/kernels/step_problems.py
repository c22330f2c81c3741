"""Results of the kernels between products in float64, and how far rounding may lead away from them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.kernels.step import (
    ConvolutionWeights,
    DeltaWeights,
    HeadNorm,
    HeadWork,
    LatentWeights,
    LayerInputWeights,
    MambaWeights,
    RowNorm,
)
from marlinq.models.anatomy import Slices

# Relative error over a whole result. Rounding it once gives 2^-11 / sqrt(3) = 2.8e-4 in float16 and
# 2^-8 / sqrt(3) = 2.3e-3 in bfloat16. A second rounding on the way (of the normalised value, of the
# probabilities) adds as much again, independently: sqrt(2) times, and a third for the sums before a norm.
BOUND = {torch.float16: 5e-4, torch.bfloat16: 4e-3}


def random(*shape: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
    """Normal numbers in ``dtype``."""
    return (torch.randn(*shape) * size).to(dtype)


def expected_groups(decisive: Tensor, groups: int, kept: int, *, zeroed: bool, summed: int = 2) -> Tensor:
    """``decisive`` [M, experts] of the ``kept`` groups with the largest sums of their ``summed`` highest
    values."""
    apart = decisive.unflatten(-1, (groups, -1))
    worth = apart.sort(-1, descending=True).values[..., :summed].sum(-1)
    places = (-worth).sort(dim=-1, stable=True).indices.argsort(-1)
    return torch.where(places[..., None] < kept, apart, 0.0 if zeroed else -torch.inf).flatten(-2)


def expected_norm(x: Tensor, norm: RowNorm | HeadNorm) -> Tensor:
    """``norm`` over the last axis of float64."""
    if norm.kind == "LAYER":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight is not None:
        x = x * (norm.weight.double() + norm.offset)
    return x if norm.bias is None else x + norm.bias.double()


def expected_rotation(x: Tensor, table: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """x [M, heads, D], its first channels rotated by ``table`` [L, channels / 2, 2] at ``positions`` [M]."""
    half = table.shape[1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turning.unflatten(-1, (half, 2)) if interleaved else turning.unflatten(-1, (2, half)).mT
    turns = torch.view_as_complex(table.double().contiguous())[positions][:, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat((turned, rest), -1)


def expected_heads(
    x: Tensor, heads: int, kv: int, size: int, positions: Tensor, work: HeadWork
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [M, heads, D] in float64; queries three times where keys are shared."""
    columns_of = (heads * size, *((kv * size,) * work.keys_and_values))
    split = Slices(("qkv",), columns_of, work.turns).split(x.double())
    parts = [part.unflatten(1, (-1, size)) for part in split]
    # Values that are keys, before norm and rotation.
    parts += [parts[-1]] * (3 - len(parts))
    if work.value_eps is not None:
        parts[2] = expected_norm(parts[2], RowNorm("RMS_WIDE", None, None, work.value_eps))
    for index, norm in enumerate((work.query_norm, work.key_norm)):
        part = parts[index]
        if work.table is not None and work.norms_behind:
            part = expected_rotation(part, work.table, positions, interleaved=work.interleaved)
            part = part.to(x.dtype).double()
        if norm is not None and norm.wide:
            part = expected_norm(part.flatten(1), norm).unflatten(1, (-1, size))
        elif norm is not None:
            part = expected_norm(part, HeadNorm(norm.kind, None, None, norm.eps))
            for name in ("weight", "bias"):
                found = getattr(norm, name)
                if found is not None:
                    found = found.double().view(-1, size)
                    part = part * (found + norm.offset) if name == "weight" else part + found
        if work.table is not None and not work.norms_behind:
            part = expected_rotation(part, work.table, positions, interleaved=work.interleaved)
        parts[index] = part
    return parts[0], parts[1], parts[2]


def expected_factors(x: Tensor, out: Tensor, kv: int, work: HeadWork) -> Tensor:
    """Factors of attention's result ``out`` [M, H, D] in float64, from the gates in rows ``x``; 1 without."""
    m, heads, size = out.shape
    wide = x.double()
    behind = wide[:, (work.heads_each * heads + work.keys_and_values * kv) * size :]
    match work.gates:
        case "none":
            return torch.ones((), dtype=torch.float64)
        case "queries":
            gates = wide[:, : 2 * heads * size].reshape(m, heads, 2, size)[:, :, 1]
        case "channels":
            gates = behind[:, : heads * size].reshape(m, heads, size)
        case "heads":
            gates = behind[:, :heads, None]
    return F.softplus(gates) if work.softplus else gates.sigmoid()


def expected_activation(name: str, x: Tensor) -> Tensor:
    """The activation of float64, by its definition in torch."""
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
    assert name == "relu2"
    return F.relu(x).square()


def expected_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, H, D] in float64, of one query per sequence at position ``lengths[b]``; ``sinks`` [H]."""
    group = q.shape[1] // keys.shape[1]
    results = []
    for b, length in enumerate(lengths.tolist()):
        begin = 0 if window is None else max(0, length + 1 - window)
        k, v = (x[b, :, begin : length + 1].double().repeat_interleave(group, 0) for x in (keys, values))
        scores = (k @ q[b].double()[:, :, None])[..., 0] * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        parts = scores.exp()
        whole = parts.sum(-1, keepdim=True)
        if sinks is not None:
            whole = whole + sinks.double().exp()[:, None]
        results.append(((parts / whole)[:, None] @ v)[:, 0])
    return torch.stack(results)


def _convolved(
    newest: Tensor, ring: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The convolution behind the token ``newest`` [B, C], rounded as kernels do, in float64; and
    the ring with that token."""
    ring, slots, taps = ring.clone(), ring.shape[1], weight.shape[1]
    total = torch.zeros_like(newest, dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        ring[b, length % slots] = newest[b]
        for tap in range(min(taps, length + 1)):
            total[b] += weight[:, taps - 1 - tap].double() * ring[b, (length - tap) % slots].double()
    if bias is not None:
        total += bias.double()
    return total.to(newest.dtype), ring


def _silu(x: Tensor) -> Tensor:
    """``silu`` rounded to the dtype of ``x``, in float64."""
    return F.silu(x).double()


def expected_layer_inputs(tokens: Tensor, x: Tensor, weights: LayerInputWeights) -> Tensor:
    """The vectors of all layers, [M, layers * P] in float64."""
    found = weights.table[tokens].double() * weights.table_scale
    given = x.double()[:, : found.shape[1]].unflatten(1, (-1, weights.width))
    return weights.scale * (expected_norm(given, weights.norm).flatten(1) + found)


def expected_convolution(
    x: Tensor, ring: Tensor, lengths: Tensor, weights: ConvolutionWeights
) -> tuple[Tensor, Tensor]:
    """The result of a gated convolution [B, channels] in float64, and the ring, behind a token."""
    parts = list(x[:, : 3 * weights.channels].split(weights.channels, 1))
    gate = parts.pop(weights.gate)
    newest = (parts[0].double() * parts[1].double()).to(x.dtype)
    convolved, ring = _convolved(newest, ring, lengths, weights.weight, weights.bias)
    return gate.double() * convolved.double(), ring


def expected_mamba(
    x: Tensor, ring: Tensor, state: Tensor, lengths: Tensor, weights: MambaWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """The result [B, width] and the state in float64, and the ring, behind a token."""
    width, keys, shape = weights.width, weights.groups * weights.state_dim, (weights.groups, -1)
    widths = (width, width, keys, keys, weights.heads)
    gate, *joined, step = x[:, : sum(widths)].split(widths, -1)
    convolved, ring = _convolved(torch.cat(joined, -1), ring, lengths, weights.weight, weights.bias)
    values, key, query = _silu(convolved).split((width, keys, keys), -1)
    values = values.unflatten(-1, (weights.heads, -1))
    each = weights.heads // weights.groups
    key, query = (part.unflatten(-1, shape).repeat_interleave(each, 1) for part in (key, query))
    steps = F.softplus(step.double() * weights.step_scale + weights.step_bias.double())
    steps = steps.clamp(weights.least_step, weights.most_step)
    decay = (steps * weights.rates.double()).exp()[..., None, None]
    state = decay * state.double() + torch.einsum("bh,bhn,bhp->bhnp", steps, key, values)
    mixed = torch.einsum("bhnp,bhn->bhp", state, query) + weights.skip.double()[:, None] * values
    gates, result = F.silu(gate.double() * weights.gate_scale), mixed.flatten(1)
    if weights.norm is None:
        return weights.result_scale * result * gates, state, ring
    rows = (result if weights.norm_first else result * gates).unflatten(-1, (-1, weights.norm_width))
    rows = rows * (rows.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
    result = weights.result_scale * rows.flatten(1) * weights.norm.double()
    return result * gates if weights.norm_first else result, state, ring


def expected_latent_rows(latent: Tensor, lengths: Tensor, weights: LatentWeights) -> Tensor:
    """New rows of the cache, [M, width] in float64."""
    parts = torch.split(latent.double()[:, : weights.width], [weights.latent_dim, weights.rotated_dim], 1)
    key = expected_rotation(parts[1][:, None], weights.table, lengths.long(), interleaved=weights.interleaved)
    return torch.cat((expected_norm(parts[0], weights.norm), key[:, 0]), 1)


def expected_latent_queries(q: Tensor, lengths: Tensor, weights: LatentWeights) -> Tensor:
    """Absorbed queries, [M, H, width] in float64."""
    by_head = q.double().unflatten(1, (weights.heads, -1))
    plain, turning = torch.split(by_head, [weights.plain_dim, weights.rotated_dim], 2)
    turned = expected_rotation(turning, weights.table, lengths.long(), interleaved=weights.interleaved)
    return torch.cat((torch.einsum("mhn,hln->mhl", plain, weights.keys.double()), turned), 2)


def expected_latent(
    queries: Tensor, cache: Tensor, lengths: Tensor, weights: LatentWeights, scale: float
) -> Tensor:
    """The result [M, H * V] in float64, from queries [M, H, width] and caches that hold the new rows."""
    rows = cache.double().expand(len(queries), -1, -1)
    results = []
    for m, length in enumerate(lengths.tolist()):
        seen = rows[m, : length + 1]
        shares = (queries[m].double() @ seen.T * scale).softmax(-1)
        mixed = shares @ seen[:, : weights.latent_dim]
        results.append(torch.einsum("hl,hvl->hv", mixed, weights.values.double()).flatten())
    return torch.stack(results)


def expected_delta(
    x: Tensor,
    rates: Tensor,
    ring: Tensor,
    state: Tensor,
    lengths: Tensor,
    weights: DeltaWeights,
    second: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result [B, value heads * value channels] and the state in float64, and the ring, behind a token."""
    keys, values = weights.key_heads * weights.key_dim, weights.value_heads * weights.value_dim
    heads = weights.value_heads
    if second is not None:
        joined = list(x[:, : 2 * keys + values].split((keys, keys, values), -1))
        gate, step = second[1], second[0].double()
    else:
        *joined, gate = Slices(("",), (keys, keys, values, values), weights.turns).split(
            x[:, : 2 * (keys + values)]
        )
    if weights.rates is not None:
        runs, each = weights.turns, heads // weights.turns
        rows = torch.cat([torch.arange(each) + 2 * each * run for run in range(runs)])
        beta, *apart = (
            (rates.double() @ weight[rows].double().T).to(x.dtype).double()
            for weight in (weights.rates.betas, weights.rates.steps)
        )
    elif second is not None:
        beta, apart = rates[:, :heads].double(), []
    else:
        beta, *apart = (part.double() for part in Slices(("",), (heads, heads), weights.turns).split(rates))
    if second is None:
        step = apart[0]
    convolved, ring = _convolved(torch.cat(joined, -1), ring, lengths, weights.weight, None)
    parts = _silu(convolved).split((keys, keys, values), -1)
    counts = (weights.key_heads, weights.key_heads, heads)
    q, k, v = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, counts, strict=True))
    q, k = (
        (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
            heads // weights.key_heads, 1
        )
        for part in (q, k)
    )
    bias = weights.step_bias.view(heads, -1)
    steps = F.softplus(step.reshape(len(x), heads, -1) + bias)
    state = state.double() * (-weights.decay.double().exp()[:, None] * steps).exp()[..., None]
    missing = v - torch.einsum("bhkv,bhk->bhv", state, k)
    beta = weights.beta_scale * beta.sigmoid().to(x.dtype).double()
    state = state + torch.einsum("bhk,bhv->bhkv", k, beta[..., None] * missing)
    mixed = torch.einsum("bhkv,bhk->bhv", state, q * weights.key_dim**-0.5)
    normed = mixed * (mixed.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * weights.norm.double()
    factors = F.silu(gate.double()) if second is None else gate.double().sigmoid()
    return normed.flatten(1) * factors, state, ring


def expected_delta_run(
    x: Tensor,
    rates: Tensor,
    ring: Tensor,
    state: Tensor,
    lengths: Tensor,
    weights: DeltaWeights,
    second: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results [T, value heads * value channels] and states [T, ...] in float64, and the ring, behind T
    neighbouring tokens of one sequence."""
    results, states = [], []
    for token in range(len(x)):
        row = slice(token, token + 1)
        given = None if second is None else (second[0][row], second[1][row])
        result, state, ring = expected_delta(
            x[row], rates[row], ring, state, lengths[:1] + token, weights, given
        )
        results.append(result)
        states.append(state)
    return torch.cat(results), torch.cat(states), ring


def rotation_table(capacity: int, channels: int) -> Tensor:
    """Cosines and sines [L, channels / 2, 2] in float32 of the usual frequencies."""
    frequencies = 10000.0 ** (-torch.arange(0, channels, 2).double() / channels)
    angles = torch.arange(capacity).double()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), -1).float()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; NaN when anything found is NaN."""
    return float((found.double() - expected).norm() / expected.norm())
