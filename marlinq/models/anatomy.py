"""What a decoder computes, in values: the vocabulary that recognition writes and executors read.

Names in here are full module names of the transformers model that was recognised, so that an executor can
fetch weights from it. Nothing in here runs a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marlinq.models.delta_net import DeltaNet
from marlinq.models.parts import Norm, Slices

__all__ = [
    "MLP",
    "Anatomy",
    "Attention",
    "DeltaNet",
    "Groups",
    "Layer",
    "Mixture",
    "Norm",
    "Rotary",
    "Router",
    "Slices",
    "Unrecognised",
]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of one layer.

    Attributes:
        module: full name of the module whose buffers hold the frequencies.
        frequencies: name of that buffer, float [channels / 2].
        channels: channels of each head, from its first; the others pass unchanged.
        interleaved: pairs are neighbours (0, 1), instead of (0, channels / 2).
        scaling: factor on cosines and sines.
        limit: positions that the frequencies hold for; None for all. Some models compute others once a
            sequence is longer.
    """

    module: str
    frequencies: str
    channels: int
    interleaved: bool = False
    scaling: float = 1.0
    limit: int | None = None


@dataclass(frozen=True)
class Attention:
    """Causal self-attention with grouped queries.

    Attributes:
        qkv: the projections of queries, keys and values.
        output: full name of the projection behind the attention.
        heads, kv_heads, head_dim: H, KV and D; H is a multiple of KV.
        scale: factor on the dot products.
        window: positions that a query sees at most, its own included; None for all.
        softcap: dot products become ``softcap * tanh(product / softcap)``; None for no cap.
        query_norm, key_norm: applied per head, or over all heads, before the rotary embedding.
        rotary: None where positions are not rotated.
        gated: each head of queries is followed by as many columns of gates, so ``qkv`` has 2 H D columns of
            queries; attention's result is multiplied by the gates' sigmoid.
    """

    qkv: Slices
    output: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotary: Rotary | None = None
    gated: bool = False


@dataclass(frozen=True)
class MLP:
    """``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` without a gate.

    Attributes:
        inputs: gate and up, or up alone.
        gated: whether there is a gate.
        down: full name of the last projection.
        activation: ``silu``, ``gelu``, ``gelu_tanh``, ``relu`` or ``relu2``.
    """

    inputs: Slices
    gated: bool
    down: str
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True)
class Groups:
    """Groups of neighbouring experts, of which a token first chooses some.

    A group counts as much as the two highest ``score + correction`` in it together.

    Attributes:
        count: groups, all of one size.
        kept: those that count most; a token's experts are chosen in them.
        zeroed: experts of the other groups take part with 0 instead of ``score + correction``. It makes a
            difference where all that is left is negative.
    """

    count: int
    kept: int
    zeroed: bool = False

    def limited(self, decisive: Tensor) -> Tensor:
        """``decisive``, the ``score + correction`` [..., experts], with -inf or 0 for what is left out."""
        apart = decisive.view(*decisive.shape[:-1], self.count, -1)
        kept = apart.topk(2, -1).values.sum(-1).topk(self.kept, -1).indices
        left_out = torch.ones_like(apart[..., 0], dtype=torch.bool).scatter_(-1, kept, False)
        return apart.masked_fill(left_out[..., None], 0.0 if self.zeroed else -torch.inf).flatten(-2)


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and how much each counts.

    With ``logits = W x`` and their ``scores``, the ``top`` experts of the highest scores are taken; their
    weights are ``scale * score``, or ``scale * score / (sum of the scores taken)`` where ``normalised``.
    A softmax over the logits that were taken is the same as a normalised one over all. With a ``correction``
    those are taken whose ``score + correction`` is highest; weights are made of scores alone all the same.

    Attributes:
        module: full name of the module whose ``weight`` [experts, hidden] makes the logits, in its dtype.
        experts: rows of that weight.
        top: experts of a token.
        scoring: ``softmax`` over all experts, or ``sigmoid`` of each.
        normalised, scale: as above.
        correction: full name of the buffer [experts] that is added to scores where experts are chosen; None
            without one.
        groups: limit the choice; only with a correction. None without groups.
        wide: logits are a product in float32, of which none is rounded to the activations' dtype.
    """

    module: str
    experts: int
    top: int
    scoring: Literal["softmax", "sigmoid"]
    normalised: bool
    scale: float = 1.0
    correction: str | None = None
    groups: Groups | None = None
    wide: bool = False


@dataclass(frozen=True)
class Mixture:
    """A routed MLP: ``sum_s weight_s * expert_s(x)``, and what every token gets beside it.

    Attributes:
        router: chooses.
        experts: full name of the module of the gated experts. It takes hidden states [T, hidden], the chosen
            experts' numbers [T, top] and their weights.
        activation: between the products of an expert.
        shared: an MLP that every token passes, whose result is added; None without one.
        shared_gate: full name of a linear with one column, whose sigmoid multiplies what ``shared`` gives;
            None for a factor of 1.
    """

    router: Router
    experts: str
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
    shared: MLP | None = None
    shared_gate: str | None = None


@dataclass(frozen=True)
class Layer:
    """One decoder block.

    With x the residual stream::

        a = attention(attention_norm(x));  x = x + residual_scale * post_attention_norm(a)
        m = mlp(mlp_norm(x));              x = x + residual_scale * post_mlp_norm(m)

    In a parallel block both read the same x, and ``x + a + m`` follows. A norm that is None is left out.

    Attributes:
        name: the block's full module name.
        attention: attention, or the delta net in its place.
        mlp: an MLP, or routed experts.
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm: as above.
        parallel: attention and MLP read the same x.
        residual_scale: factor on what is added.
    """

    name: str
    attention: Attention | DeltaNet
    mlp: MLP | Mixture
    attention_norm: Norm | None
    mlp_norm: Norm | None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True)
class Anatomy:
    """A whole decoder.

    Attributes:
        embedding: full name of the token embedding.
        embedding_scale: factor on its rows, as the model applies it in its dtype.
        positions: full name of a learned position embedding, or None.
        positions_offset: added to a position before it is looked up there.
        embedding_norm: behind the embedding, or None.
        layers: the blocks in order.
        final_norm: before the head, or None.
        head: full name of the output head (its weight may be tied to the embedding).
        logit_scale: factor on the logits.
        logit_softcap: as :attr:`Attention.softcap`, for the logits, after ``logit_scale``.
    """

    embedding: str
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    head: str
    embedding_scale: float = 1.0
    positions: str | None = None
    positions_offset: int = 0
    embedding_norm: Norm | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True)
class Unrecognised:
    """Why a model has no anatomy.

    Attributes:
        part: the module or config entry, by its full name.
        reason: one clause, for people.
    """

    part: str
    reason: str
