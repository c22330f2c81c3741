"""Prompts through a gated delta net of the chain, in torch, behind its projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.models.convolution import convolve
from marlinq.models.delta_net import delta_rule, heads_of
from marlinq.runtime.step.bound import BoundDelta


def read_delta(
    delta: BoundDelta, joined: Tensor, rates: Tensor, part: slice, start: int, ends: Tensor
) -> Tensor:
    """The result of a piece of prompts; ring and state continue from the piece before.

    Args:
        delta: the net.
        joined: [b, T, columns], results of its input projections; further columns are padding.
        rates: [b, T, columns], betas and steps.
        part: the b rows of the batch.
        start: position of the first token; at 0 the ring and the state are emptied.
        ends: int64 [b], tokens of each prompt.

    Returns:
        [b, T, value heads * value channels].
    """
    net, weights = delta.net, delta.weights
    ring, state = delta.ring[part], delta.state[part]
    if start == 0:
        ring.zero_()
        state.zero_()
    *parts, gate = net.inputs.split(joined[..., : sum(net.inputs.widths)])
    beta, step = net.rates.split(rates[..., : sum(net.rates.widths)])
    inputs, tokens = torch.cat(parts, -1), joined.shape[1]
    places = torch.arange(net.taps - 1, device=joined.device)
    before = ring[:, (start - (net.taps - 1) + places) % net.taps]
    convolved = F.silu(convolve(inputs, before, weights.weight))
    heads = heads_of(net, convolved, beta, step, weights.decay, weights.step_bias)
    # Padding must neither decay nor change the state.
    there = (ends - start).clamp(0, tokens)
    padding = (torch.arange(tokens, device=joined.device) >= there[:, None])[..., None]
    heads = heads._replace(
        decay=heads.decay.masked_fill(padding, 0.0), beta=heads.beta.masked_fill(padding, 0.0)
    )
    mixed = delta_rule(heads, state).to(joined.dtype)
    last = there[:, None] + places
    kept = torch.cat((before, inputs), 1).gather(1, last[..., None].expand(-1, -1, inputs.shape[-1]))
    slots = (start - (net.taps - 1) + last) % net.taps
    ring.scatter_(1, slots[..., None].expand_as(kept), kept)
    normed = F.rms_norm(mixed.float(), (net.value_dim,), None, weights.eps).to(joined.dtype)
    normed = (normed.float() * weights.norm.float()).to(joined.dtype)
    result: Tensor = normed.float().flatten(-2) * F.silu(gate.float())
    return result.to(joined.dtype)
