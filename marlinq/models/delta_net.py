"""Gated delta nets: their description, and their arithmetic in torch.

A head keeps a matrix S [key channels, value channels] instead of keys and values. Each token decays S, and
then corrects the value that S gives for the token's key::

    S = exp(decay) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q

(Yang et al., "Gated Delta Networks", 2024). Queries, keys and values come from a short causal convolution
over time; queries and keys are normalised to length one.
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


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net in the place of attention.

    Attributes:
        inputs: projections of queries, keys, values and gates.
        rates: projections of ``beta`` before its sigmoid and of the step, one column per value head each.
        convolution: full name of the depthwise convolution over the concatenated queries, keys and values.
        taps: number of tokens that the convolution sees, the newest included.
        decay: full name of the parameter [value heads] whose exponential multiplies the steps.
        step_bias: full name of the parameter [value heads] that is added to the step before its softplus.
        norm: norm of each head's result, before it is multiplied by ``silu(gate)``.
        output: full name of the output projection.
        key_heads: number of heads of queries and of keys.
        value_heads: number of heads of values, a multiple of ``key_heads``.
        key_dim, value_dim: channels of a key head and of a value head.
        beta_scale: factor of ``beta`` behind its sigmoid; 2 lets a correction overshoot.
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
        )


class Heads(NamedTuple):
    """Inputs of the delta rule, float32: queries and keys [B, T, value heads, key channels], values [B, T,
    value heads, value channels], logarithms of decays and betas [B, T, value heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def heads_of(
    net: DeltaNet, convolved: Tensor, beta: Tensor, step: Tensor, decay: Tensor, step_bias: Tensor
) -> Heads:
    """Heads of ``convolved`` [B, T, C], behind its activation, and of the rates [B, T, value heads];
    parameters are float32."""
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    shapes = ((net.key_heads, net.key_dim), (net.key_heads, net.key_dim), (net.value_heads, net.value_dim))
    parts = torch.split(convolved.float(), [keys, keys, values], -1)
    q, k, v = (part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True))
    group = net.value_heads // net.key_heads
    q, k = (_to_length_one(x).repeat_interleave(group, 2) for x in (q, k))
    rate = -decay.exp() * F.softplus(step.float() + step_bias)
    return Heads(q * net.key_dim**-0.5, k, v, rate, net.beta_scale * beta.sigmoid().float())


def _to_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def delta_step(heads: Heads, state: Tensor) -> Tensor:
    """The delta rule for one token (T = 1); returns [B, 1, value heads, value channels].

    ``state``, float32 [B, value heads, key channels, value channels], is updated in place.
    """
    q, k, v, decay, beta = (x[:, 0] for x in heads)
    state *= decay.exp()[..., None, None]
    correction = beta[..., None] * (v - (k[..., None, :] @ state)[..., 0, :])
    state += k[..., :, None] * correction[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :][:, None]


def delta_rule(heads: Heads, state: Tensor) -> Tensor:
    """The delta rule for all tokens, chunk by chunk; returns [B, T, value heads, value channels].

    ``state`` is updated in place as in :func:`delta_step`. In a chunk that starts with S, and with the
    cumulated decays c, the corrections d solve the triangular system
    ``d_i = beta_i (v_i - exp(c_i) S^T k_i - sum over j < i of exp(c_i - c_j) (k_i . k_j) d_j)``. All else are
    matrix products.
    """
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
