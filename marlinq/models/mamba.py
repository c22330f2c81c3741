"""Mamba-2 mixers: their description, and their arithmetic in torch.

A head keeps a matrix S [state channels, value channels] instead of keys and values. Each token decays S, adds
its value under its key, and reads S with its query::

    S = exp(step A) S + step B x^T;   y = S^T C + D x

where x is the value, B the key and C the query (Dao and Gu, "Transformers are SSMs", 2024). They come from a
short causal convolution over time. Heads of a group share B and C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.models.parts import Norm, Slices

_CHUNK = 64
"""tokens of a prompt that are multiplied together"""


@dataclass(frozen=True)
class Scales:
    """Factors on the columns of a mixer's input projection."""

    gate: float = 1.0
    value: float = 1.0
    key: float = 1.0
    query: float = 1.0
    step: float = 1.0

    def times(self, factor: float) -> Scales:
        """All factors multiplied by ``factor``."""
        return Scales(
            self.gate * factor,
            self.value * factor,
            self.key * factor,
            self.query * factor,
            self.step * factor,
        )


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 mixer in the place of attention.

    Attributes:
        inputs: projections of gates, values, keys (B), queries (C) and steps.
        convolution: full name of the depthwise convolution over the concatenated values, keys and queries.
        taps: number of tokens that the convolution sees, the newest included.
        decay: full name of the parameter [heads] whose negative exponential is A.
        step_bias: full name of the parameter [heads] that is added to the steps before their softplus.
        skip: full name of the parameter [heads] D.
        norm: norm of each group of the result's channels by itself; its width is a group's, its weight has a
            value for every channel. None without a norm.
        norm_first: whether the norm stands before the product with ``silu(gate)`` and not behind it.
        output: full name of the output projection.
        heads, head_dim: number of heads, and channels of a value.
        groups, state_dim: number of groups of heads, and channels of a key.
        least_step, most_step: bounds of a step; no upper one if None.
        scales: factors on the columns of ``inputs``.
    """

    inputs: Slices
    convolution: str
    taps: int
    decay: str
    step_bias: str
    skip: str
    norm: Norm | None
    norm_first: bool
    output: str
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    least_step: float = 0.0
    most_step: float | None = None
    scales: Scales = Scales()

    @property
    def width(self) -> int:
        """Channels of the values, the gates and the result."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.width + 2 * self.groups * self.state_dim

    def within(self, name: str) -> Mamba:
        """This mixer with names relative to the parent of module ``name``."""
        return replace(
            self,
            inputs=self.inputs.within(name),
            convolution=f"{name}.{self.convolution}",
            decay=f"{name}.{self.decay}",
            step_bias=f"{name}.{self.step_bias}",
            skip=f"{name}.{self.skip}",
            norm=None if self.norm is None else replace(self.norm, module=f"{name}.{self.norm.module}"),
            output=f"{name}.{self.output}",
        )


class Tokens(NamedTuple):
    """Inputs of the recurrence, float32: values [B, T, heads, value channels], keys and queries [B, T,
    groups, state channels], steps [B, T, heads]."""

    values: Tensor
    keys: Tensor
    queries: Tensor
    steps: Tensor


def tokens_of(mixer: Mamba, convolved: Tensor, step: Tensor, step_bias: Tensor) -> Tokens:
    """Inputs of the recurrence from ``convolved`` [B, T, C], behind its activation, and from the projected
    steps [B, T, heads]; ``step_bias`` is float32."""
    keys = mixer.groups * mixer.state_dim
    values, key, query = torch.split(convolved.float(), [mixer.width, keys, keys], -1)
    steps = F.softplus(step.float() * mixer.scales.step + step_bias)
    steps = steps.clamp(mixer.least_step, mixer.most_step)
    shape = (mixer.groups, mixer.state_dim)
    return Tokens(
        values.reshape(*values.shape[:-1], mixer.heads, mixer.head_dim),
        key.reshape(*key.shape[:-1], *shape),
        query.reshape(*query.shape[:-1], *shape),
        steps,
    )


def scan(tokens: Tokens, rates: Tensor, skip: Tensor, state: Tensor) -> Tensor:
    """The recurrence for all tokens, chunk by chunk; returns float32 [B, T, heads, value channels].

    In a chunk that starts with S, and with the cumulated decays c, a token's result is
    ``exp(c_i) S^T C_i + sum over j <= i of exp(c_i - c_j) (C_i . B_j) step_j x_j + D x_i``.

    Args:
        tokens: inputs. A step of zero neither decays nor changes the state.
        rates: A, float32 [heads].
        skip: D, float32 [heads].
        state: float32 [B, heads, state channels, value channels]; updated in place.
    """
    groups = tokens.keys.shape[2]
    held = _grouped(state, groups)
    results = []
    for start in range(0, tokens.values.shape[1], _CHUNK):
        values, keys, queries, steps = (x[:, start : start + _CHUNK].transpose(1, 2) for x in tokens)
        added = _grouped(values * steps[..., None], groups)
        keys, queries = keys[:, :, None], queries[:, :, None]
        sums = _grouped((rates[:, None] * steps).cumsum(-1), groups)
        places = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=sums.device)
        apart = (sums[..., :, None] - sums[..., None, :]).masked_fill(places.triu(1), -torch.inf).exp()
        reach = sums.exp()[..., None]
        result = reach * (queries @ held) + (apart * (queries @ keys.transpose(-1, -2))) @ added
        left = (sums[..., -1:] - sums).exp()[..., None]
        held *= reach[..., -1:, :]
        held += keys.transpose(-1, -2) @ (left * added)
        results.append(result.flatten(1, 2) + skip[:, None, None] * values)
    return torch.cat(results, 2).transpose(1, 2)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, heads, ...] to [B, groups, heads of a group, ...], a view."""
    return x.view(x.shape[0], groups, -1, *x.shape[2:])


def gated(mixer: Mamba, mixed: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
    """``mixed``, float32 [B, T, heads, value channels], normalised and multiplied by ``silu(gate)``: float32
    [B, T, width]. ``weight`` is that of the norm, float32 [width], or None without a norm."""
    gates = F.silu(gate.float() * mixer.scales.gate)
    result = mixed.flatten(-2)
    if mixer.norm is None or weight is None:
        return result * gates
    if not mixer.norm_first:
        result = result * gates
    width = mixer.norm.width
    rows = result.reshape(*result.shape[:-1], -1, width)
    result = F.rms_norm(rows, (width,), None, mixer.norm.eps).flatten(-2) * weight
    return result * gates if mixer.norm_first else result
