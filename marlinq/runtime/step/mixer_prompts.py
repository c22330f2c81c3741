"""Prompts through a recurrent mixer or gated convolution of the chain, in torch, behind its projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.models.convolution import convolve
from marlinq.models.delta_net import delta_rule, heads_of
from marlinq.models.mamba import gated, scan, tokens_of
from marlinq.runtime.step.bound import BoundConvolution, BoundDelta, BoundMamba


def read_delta(
    delta: BoundDelta,
    joined: Tensor,
    rates: Tensor,
    part: slice,
    start: int,
    ends: Tensor,
    second: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The result of a piece of prompts; ring and state continue from the piece before.

    Args:
        delta: the net.
        joined: [b, T, columns], results of its input projections; further columns are padding.
        rates: [b, T, columns], betas and steps; betas alone with ``second``.
        part: the b rows of the batch.
        start: position of the first token; at 0 the ring and the state are emptied.
        ends: int64 [b], tokens of each prompt.
        second: [b, T, columns] each, steps by channel and gates; None where ``rates`` and ``joined`` have
            them.

    Returns:
        [b, T, value heads * value channels].
    """
    net, weights = delta.net, delta.weights
    state = _emptied(delta.state[part], start)
    q, k, v, *others = net.inputs.split(joined[..., : sum(net.inputs.widths)])
    beta, *steps = net.rates.split(rates[..., : sum(net.rates.widths)])
    step, gate = (steps[0], others[0]) if second is None else second
    there = (ends - start).clamp(0, joined.shape[1])
    joined_parts, ring = torch.cat((q, k, v), -1), delta.ring[part]
    convolved = F.silu(_convolved(joined_parts, ring, weights.weight, None, start, there))
    heads = heads_of(net, convolved, beta, step, weights.decay, weights.step_bias)
    heads = heads.without(_padding(joined, there)[..., 0])
    mixed = delta_rule(heads, state).to(joined.dtype)
    normed = F.rms_norm(mixed.float(), (net.value_dim,), None, weights.eps)
    result: Tensor
    if second is not None:
        result = (normed * weights.norm.float()).flatten(-2) * gate.float().sigmoid()
        return result.to(joined.dtype)
    normed = (normed.to(joined.dtype).float() * weights.norm.float()).to(joined.dtype)
    result = normed.float().flatten(-2) * F.silu(gate.float())
    return result.to(joined.dtype)


def read_mamba(bound: BoundMamba, joined: Tensor, part: slice, start: int, ends: Tensor) -> Tensor:
    """As :func:`read_delta`, of a Mamba-2 mixer: [b, T, width]."""
    mixer, weights = bound.mixer, bound.weights
    state = _emptied(bound.state[part], start)
    gate, *parts, step = mixer.inputs.split(joined[..., : sum(mixer.inputs.widths)])
    there = (ends - start).clamp(0, joined.shape[1])
    inputs, ring = torch.cat(parts, -1), bound.ring[part]
    convolved = F.silu(_convolved(inputs, ring, weights.weight, weights.bias, start, there))
    tokens = tokens_of(mixer, convolved, step, weights.step_bias)
    # Padding must neither decay nor change the state.
    tokens = tokens._replace(steps=tokens.steps.masked_fill(_padding(joined, there), 0.0))
    mixed = scan(tokens, weights.rates, weights.skip, state)
    return (weights.result_scale * gated(mixer, mixed, gate, weights.norm)).to(joined.dtype)


def read_convolution(
    bound: BoundConvolution, joined: Tensor, part: slice, start: int, ends: Tensor
) -> Tensor:
    """As :func:`read_delta`, of a gated convolution: [b, T, channels]."""
    inputs, weights = bound.mixer.inputs, bound.weights
    given, gate = bound.mixer.parts(inputs.split(joined[..., : sum(inputs.widths)]))
    there = (ends - start).clamp(0, joined.shape[1])
    return gate * _convolved(given, bound.ring[part], weights.weight, weights.bias, start, there)


def _emptied(state: Tensor, start: int) -> Tensor:
    """``state``, emptied before the first token."""
    return state if start else state.zero_()


def _padding(x: Tensor, there: Tensor) -> Tensor:
    """bool [b, T, 1], whether a token of ``x`` [b, T, columns] stands behind the first ``there`` [b]."""
    return (torch.arange(x.shape[1], device=x.device) >= there[:, None])[..., None]


def _convolved(
    inputs: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None, start: int, there: Tensor
) -> Tensor:
    """The convolution of ``inputs`` [b, T, C]; ``ring`` then holds the last of the first
    ``there`` [b] inputs, and is emptied before if ``start``, the first one's position, is 0."""
    if start == 0:
        ring.zero_()
    slots, taps = ring.shape[1], weight.shape[1]
    places = torch.arange(taps - 1, device=inputs.device)
    before = ring[:, (start - (taps - 1) + places) % slots]
    result = convolve(inputs, before, weight, bias)
    last = there[:, None] + places
    kept = torch.cat((before, inputs), 1).gather(1, last[..., None].expand(-1, -1, inputs.shape[-1]))
    targets = (start - (taps - 1) + last) % slots
    ring.scatter_(1, targets[..., None].expand_as(kept), kept)
    return result
