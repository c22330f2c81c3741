"""Gated delta nets: their description, and their arithmetic in torch.

A head keeps a matrix S [key channels, value channels] instead of keys and values. Each token decays S, and
then corrects the value that S gives for the token's key::

    S = exp(decay) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q

(Yang et al., "Gated Delta Networks", 2024). A decay is a number for each head, or for each of its key
channels, hence for each row of S (Kimi team, "Kimi Linear", 2025). Queries, keys and values come from a
short causal convolution over time; queries and keys are normalised to length one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.models.parts import Norm, Slices

_LENGTH_EPS = 1e-6
"""number added to the squared length of queries and keys, the same in all implementations"""
_CHUNK = 64
"""tokens whose corrections are solved together"""
_CHANNELS_CHUNK = 16
"""the same with decays by channel: all pairs of tokens then have a factor for each channel of each head"""


@dataclass(frozen=True)
class ChannelRates:
    """Second projections of a net with decays by channel; the first ones give both of them fewer channels.

    Attributes:
        steps: full name of the linear that gives steps, [key heads * key channels].
        gates: full name of the linear that gives gates, [value heads * value channels].
    """

    steps: str
    gates: str


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net in the place of attention.

    Attributes:
        inputs: projections of queries, keys, values and gates; with ``channels`` of queries, keys, values,
            and what both its linears read.
        rates: projections of ``beta`` before its sigmoid and of the step, one column per value head each;
            with ``channels`` of ``beta`` alone.
        convolution: full name of the depthwise convolution over the concatenated queries, keys and values.
        taps: number of tokens that the convolution sees, the newest included.
        decay: full name of the parameter [value heads] whose exponential multiplies the steps.
        step_bias: full name of the parameter, of one number a step, that is added to the step before its
            softplus.
        norm: norm of each head's result, before it is multiplied by ``silu(gate)``; with ``channels`` by
            ``sigmoid(gate)``, and rounded only then.
        output: full name of the output projection.
        key_heads: number of heads of queries and of keys.
        value_heads: number of heads of values, a multiple of ``key_heads``.
        key_dim, value_dim: channels of a key head and of a value head.
        beta_scale: factor of ``beta`` behind its sigmoid; 2 lets a correction overshoot.
        channels: projections of steps by channel, and of gates; None with a step for each value head. There
            are as many heads of keys as of values with it.
    """

    inputs: Slices
    rates: Slices
    convolution: str
    taps: int
    decay: str
    step_bias: str
    norm: Norm
    output: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    beta_scale: float = 1.0
    channels: ChannelRates | None = None

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def within(self, name: str) -> DeltaNet:
        """This net with names relative to the parent of module ``name``."""
        return replace(
            self,
            inputs=self.inputs.within(name),
            rates=self.rates.within(name),
            convolution=f"{name}.{self.convolution}",
            decay=f"{name}.{self.decay}",
            step_bias=f"{name}.{self.step_bias}",
            norm=replace(self.norm, module=f"{name}.{self.norm.module}"),
            output=f"{name}.{self.output}",
            channels=None if self.channels is None else _within(self.channels, name),
        )


def _within(rates: ChannelRates, name: str) -> ChannelRates:
    return ChannelRates(f"{name}.{rates.steps}", f"{name}.{rates.gates}")


class Heads(NamedTuple):
    """Inputs of the delta rule, float32: queries and keys [B, T, value heads, key channels], values [B, T,
    value heads, value channels], logarithms of decays [B, T, value heads, 1 or key channels] and betas [B, T,
    value heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def without(self, padding: Tensor) -> Heads:
        """These heads, of which tokens where ``padding`` [B, T] is true neither decay nor change the
        state."""
        return self._replace(
            decay=self.decay.masked_fill(padding[..., None, None], 0.0),
            beta=self.beta.masked_fill(padding[..., None], 0.0),
        )


def heads_of(
    net: DeltaNet, convolved: Tensor, beta: Tensor, step: Tensor, decay: Tensor, step_bias: Tensor
) -> Heads:
    """Heads of ``convolved`` [B, T, C], behind its activation, of betas [B, T, value heads], and of steps,
    as many, or one for each key channel of each head; parameters are float32."""
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    shapes = ((net.key_heads, net.key_dim), (net.key_heads, net.key_dim), (net.value_heads, net.value_dim))
    parts = torch.split(convolved.float(), [keys, keys, values], -1)
    q, k, v = (part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True))
    group = net.value_heads // net.key_heads
    q, k = (_to_length_one(x).repeat_interleave(group, 2) for x in (q, k))
    steps = F.softplus(step.float() + step_bias)
    rate = -decay.reshape(-1, 1).exp() * steps.reshape(*steps.shape[:-1], net.value_heads, -1)
    return Heads(q * net.key_dim**-0.5, k, v, rate, net.beta_scale * beta.sigmoid().float())


def _to_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def delta_step(heads: Heads, state: Tensor) -> Tensor:
    """The delta rule for one token (T = 1); returns [B, 1, value heads, value channels].

    ``state``, float32 [B, value heads, key channels, value channels], is updated in place.
    """
    q, k, v, decay, beta = (x[:, 0] for x in heads)
    state *= decay.exp()[..., None]
    correction = beta[..., None] * (v - (k[..., None, :] @ state)[..., 0, :])
    state += k[..., :, None] * correction[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :][:, None]


def delta_rule(heads: Heads, state: Tensor) -> Tensor:
    """The delta rule for all tokens, chunk by chunk; returns [B, T, value heads, value channels].

    ``state`` is updated in place as in :func:`delta_step`. In a chunk that starts with S, and with the
    cumulated decays c, the corrections d solve the triangular system
    ``d_i = beta_i (v_i - exp(c_i) S^T k_i - sum over j < i of exp(c_i - c_j) (k_i . k_j) d_j)``. All else are
    matrix products. With decays by channel the factor ``exp(c_i - c_j)`` has its place inside the product.
    """
    if heads.decay.shape[-1] > 1:
        return _channels_rule(heads, state)
    heads = heads._replace(decay=heads.decay[..., 0])
    results = []
    for start in range(0, heads.v.shape[1], _CHUNK):
        q, k, v, decay, beta = (x[:, start : start + _CHUNK].transpose(1, 2) for x in heads)
        sums = decay.cumsum(-1)
        tokens = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        apart = (sums[..., :, None] - sums[..., None, :]).masked_fill(tokens.triu(1), -torch.inf).exp()
        reach = sums.exp()[..., None]
        own = beta[..., None] * (v - reach * (k @ state))
        others = beta[..., None] * (apart * (k @ k.transpose(-1, -2))).tril(-1)
        corrections = torch.linalg.solve_triangular(others, own, upper=False, unitriangular=True)
        results.append(reach * (q @ state) + (apart * (q @ k.transpose(-1, -2))) @ corrections)
        left = (sums[..., -1:] - sums).exp()[..., None]
        state *= reach[..., -1:, :]
        state += (left * k).transpose(-1, -2) @ corrections
    return torch.cat(results, 2).transpose(1, 2)


def _channels_rule(heads: Heads, state: Tensor) -> Tensor:
    """As :func:`delta_rule`, with a decay for each key channel."""
    results = []
    for start in range(0, heads.v.shape[1], _CHANNELS_CHUNK):
        q, k, v, decay, beta = (x[:, start : start + _CHANNELS_CHUNK].transpose(1, 2) for x in heads)
        sums = decay.cumsum(-2)
        reach = sums.exp()
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        apart = (sums[..., :, None, :] - sums[..., None, :, :]).masked_fill(later[..., None], -torch.inf)
        both = (apart.exp() * k[..., None, :, :]) @ torch.stack((k, q), -1)
        others, seen = both.unbind(-1)
        own = beta[..., None] * (v - (reach * k) @ state)
        system = (beta[..., None] * others).tril(-1)
        corrections = torch.linalg.solve_triangular(system, own, upper=False, unitriangular=True)
        results.append((reach * q) @ state + seen @ corrections)
        left = (sums[..., -1:, :] - sums).exp()
        state *= reach[..., -1, :, None]
        state += (left * k).transpose(-1, -2) @ corrections
    return torch.cat(results, 2).transpose(1, 2)
