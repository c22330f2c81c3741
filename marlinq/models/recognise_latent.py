"""Recognises latent attention of a recorded block: compression, expansion, shared rotated keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from marlinq.models.anatomy import LatentAttention, Norm, Slices
from marlinq.models.formulas import factor
from marlinq.models.recognise_attention import RotaryModules, window_of
from marlinq.models.recording import TOKENS, AttentionCall, Call, Refusal


def find_expansion(call: AttentionCall, before: Sequence[Call]) -> Call | None:
    """The linear in ``before`` whose columns, head by head, are the first channels of the keys and then the
    values of ``call``; None if there is none, as in ordinary attention."""
    heads, key_dim, value_dim = call.keys.shape[1], call.keys.shape[-1], call.values.shape[-1]
    for each in before:
        columns = each.output.numel() // TOKENS
        plain_dim = columns // heads - value_dim
        if each.kind != "linear" or columns % heads or not 0 < plain_dim < key_dim:
            continue
        keys, values = torch.split(_by_head(each.output, heads), [plain_dim, value_dim], -1)
        if torch.equal(values, call.values) and torch.equal(keys, call.keys[..., :plain_dim]):
            return each
    return None


def latent_part(
    call: AttentionCall,
    expansion: Call,
    before: Sequence[Call],
    after: Sequence[Call],
    norms: Mapping[str, Norm],
    rotary: RotaryModules,
) -> tuple[LatentAttention, list[Call], Tensor, Call]:
    """The latent attention that ``call`` belongs to.

    Args:
        call: recorded call of attention.
        expansion: linear of :func:`find_expansion`.
        before, after: calls of its block before and after it.
        norms: all norms of the model.
        rotary: buffers with rotary frequencies.

    Returns:
        (attention, calls that belong to it with projections of the layer's input first, that input, call of
        the output projection).

    Raises:
        Refusal: a part of it is not understood.
    """
    heads, value_dim = call.input.shape[1], call.values.shape[-1]
    plain_dim = expansion.output.numel() // TOKENS // heads - value_dim
    rotated_dim = call.keys.shape[-1] - plain_dim
    if call.softcap is not None or call.sinks is not None or window_of(call.name, call.mask) is not None:
        raise Refusal(call.name, "latent attention with a window, a soft cap or sinks")
    latent_norm = _norm_before(expansion, before)
    if latent_norm is None:
        raise Refusal(expansion.name, "reads no norm of a latent")
    latent_dim = latent_norm.input.shape[-1]
    second, query_norm = _second_projection(call, plain_dim, before)
    projections = [each for each in before if each.kind == "linear" and each not in (expansion, second)]
    if not 1 <= len(projections) <= 2:
        raise Refusal(call.name, f"expected one or two linears of its input, found {len(projections)}")
    for each in projections:
        if not torch.equal(each.input, projections[0].input):
            raise Refusal(each.name, f"does not read what {projections[0].name} reads")
    query_dim = heads * call.input.shape[-1] if query_norm is None else query_norm.input.shape[-1]
    inputs, queries, latent = _inputs(projections, query_dim, latent_dim, rotated_dim, latent_norm)
    if query_norm is not None and not _same(query_norm.input, queries):
        raise Refusal(query_norm.name, "does not normalise what the first projection of queries gives")
    by_head = _by_head(queries if second is None else second.output, heads)
    if by_head.shape != call.input.shape:
        raise Refusal(call.name, "queries are not those of a linear")
    plain, turning = torch.split(by_head, [plain_dim, rotated_dim], -1)
    scaled = rotary.explain(call.input[..., :plain_dim], plain)
    query = rotary.explain(call.input[..., plain_dim:], turning, reordered=True)
    shared = _by_head(latent[..., latent_dim:], 1)
    key = rotary.explain(call.keys[:, :1, :, plain_dim:], shared, reordered=True)
    every = call.keys[..., plain_dim:]
    alike = torch.equal(every[:, :1].expand_as(every), every)
    if key is None or not alike:
        raise Refusal(call.name, "its rotated keys are not one rotation of a latent's last channels")
    if query is None or scaled is None or scaled[0] is not None:
        raise Refusal(call.name, "queries are neither what was projected nor a known rotation of it")
    if query[0] != key[0] or (query[0] is not None and query[0].channels != rotated_dim):
        raise Refusal(call.name, "queries and keys are not rotated alike")
    if abs(scaled[1] - query[1] * key[1]) > 1e-6 * abs(scaled[1]):
        raise Refusal(call.name, "rotated and other channels of its queries are scaled differently")
    output = next((each for each in after if each.kind == "linear"), None)
    if output is None or not _same(output.input, call.output):
        raise Refusal(
            call.name if output is None else output.name, "does not read the result of attention as it is"
        )
    attention = LatentAttention(
        inputs=inputs,
        query_norm=None if query_norm is None else norms[query_norm.name],
        query=None if second is None else second.name,
        latent_norm=norms[latent_norm.name],
        expansion=expansion.name,
        output=output.name,
        heads=heads,
        plain_dim=plain_dim,
        rotated_dim=rotated_dim,
        value_dim=value_dim,
        latent_dim=latent_dim,
        scale=call.scale * scaled[1],
        rotary=query[0],
    )
    inner = [each for each in (second, query_norm) if each is not None]
    return attention, [*projections, *inner, latent_norm, expansion, output], projections[0].input, output


def _inputs(
    projections: Sequence[Call], query_dim: int, latent_dim: int, rotated_dim: int, norm: Call
) -> tuple[Slices, Tensor, Tensor]:
    """(columns of the projections, those of queries, those of the latent and the rotated key behind it)."""
    widths = (query_dim, latent_dim + rotated_dim)
    for order in permutations(projections):
        joined = torch.cat([each.output for each in order], -1)
        if joined.shape[-1] != sum(widths):
            continue
        queries, latent = torch.split(joined, list(widths), -1)
        if _same(norm.input, latent[..., :latent_dim]):
            return Slices(tuple(each.name for each in order), widths), queries, latent
    raise Refusal(
        norm.name, "does not normalise the first columns of a linear, with rotated keys behind them"
    )


def _second_projection(
    call: AttentionCall, plain_dim: int, before: Sequence[Call]
) -> tuple[Call | None, Call | None]:
    """(linear that gives the queries from a norm of another linear's result, that norm); None twice if the
    queries come from the layer's input."""
    results = [each for each in before if each.kind == "linear"]
    for each in results:
        norm = _norm_before(each, before)
        if norm is None or each.output.numel() != call.input.numel():
            continue
        plain = _by_head(each.output, call.input.shape[1])[..., :plain_dim]
        width = norm.input.shape[-1]
        # A norm of the layer's input reads no linear of this block.
        inner = any(
            _same(norm.input, columns)
            for other in results
            for columns in (other.output[..., :width], other.output[..., -width:])
        )
        if inner and factor(call.input[..., :plain_dim], plain) is not None:
            return each, norm
    return None, None


def _norm_before(linear: Call, before: Sequence[Call]) -> Call | None:
    return next((each for each in before if each.kind == "norm" and _same(each.output, linear.input)), None)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.flatten(), other.flatten())


def _by_head(part: Tensor, heads: int) -> Tensor:
    """[..., T, heads * D] of a single sequence to [1, heads, T, D]."""
    return part.reshape(1, TOKENS, heads, -1).transpose(1, 2)
