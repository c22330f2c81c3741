"""Anatomy: a description of a decoder's computation that recognition writes and executors read.

Names are full module names in the recognised transformers model, from which an executor takes the weights.
Nothing here runs a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marlinq.models.convolution import GatedConvolution
from marlinq.models.delta_net import ChannelRates, DeltaNet
from marlinq.models.formulas import Activation, ExpertActivation, GateActivation
from marlinq.models.mamba import Mamba, Scales
from marlinq.models.parts import Norm, Slices

__all__ = [
    "MLP",
    "Anatomy",
    "Attention",
    "AttentionGate",
    "ChannelRates",
    "DeltaNet",
    "GatedConvolution",
    "Groups",
    "InputGate",
    "LatentAttention",
    "Layer",
    "LayerInputs",
    "Mamba",
    "Mixture",
    "Norm",
    "Rotary",
    "Router",
    "Scales",
    "Slices",
    "Unrecognised",
]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of one layer.

    Attributes:
        module: full name of the module whose buffers hold the frequencies.
        frequencies: name of that buffer, float [channels / 2].
        channels: number of rotated channels of each head, from its first; the others pass unchanged.
        interleaved: whether rotated pairs are neighbours (0, 1) and not (0, channels / 2).
        scaling: factor on cosines and sines.
        limit: number of positions for which the frequencies are valid; None for all. Some models compute
            other frequencies for longer sequences.
        backward: whether pairs turn by negative angles.
    """

    module: str
    frequencies: str
    channels: int
    interleaved: bool = False
    scaling: float = 1.0
    limit: int | None = None
    backward: bool = False


@dataclass(frozen=True)
class AttentionGate:
    """A linear of attention's input that makes factors of attention's result.

    Attributes:
        module: full name of the linear.
        activation: function of its result, ``sigmoid`` or ``softplus``.
        by_head: whether a head has one factor, and not one for each channel.
    """

    module: str
    activation: GateActivation
    by_head: bool


@dataclass(frozen=True)
class Attention:
    """Causal self-attention with grouped queries.

    Attributes:
        qkv: projections of queries, keys and values; without values where ``keys_are_values``, of queries
            alone where ``shared`` is given.
        output: full name of the output projection.
        heads, kv_heads, head_dim: H, KV and D; H is a multiple of KV.
        scale: factor on the dot products.
        window: largest number of positions that a query sees, its own included; None for all.
        softcap: dot products become ``softcap * tanh(product / softcap)``; None for no cap.
        query_norm, key_norm: norms before or behind the rotary embedding, per head or over all heads; None
            without one.
        norms_behind: whether these norms are behind the rotary embedding.
        value_norm: norm of each head of values; None without one.
        keys_are_values: whether values are what was projected as keys, before norm and rotation.
        shared: index of the earlier layer whose keys and values this one reads; None if it has its own.
        rotary: rotary embedding; None without one.
        gated: whether attention's result is multiplied by the sigmoid of gates. Each head of queries is then
            followed by as many columns of gates, and ``qkv`` has 2 H D columns of queries.
        gate: linear that makes factors of attention's result; None without one.
        sinks: full name of the parameter [heads] whose exponentials are added to the sums that the softmax
            divides by; None without sinks.
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
    sinks: str | None = None
    value_norm: Norm | None = None
    keys_are_values: bool = False
    shared: int | None = None
    norms_behind: bool = False
    gate: AttentionGate | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Causal self-attention whose keys and values are made from one latent vector of each token.

    With x the layer's input, c the normed latent, r a rotated key that all heads share, and head h's rows
    K_h [N, L] and V_h [V, L] of the expansion::

        a, (b, r) = inputs(x);  c = latent_norm(b);  q = query(query_norm(a)), or q = a
        q_h = (plain, rotated);  key_h = (K_h c, r);  value_h = V_h c

    Since ``plain . K_h c = (K_h^T plain) . c``, a cache of c and r is enough: queries absorb K, and V
    multiplies attention's result, a sum of latents. (DeepSeek-AI, "DeepSeek-V2", 2024.)

    Attributes:
        inputs: projections of x: queries or what their norm reads, then the latent and behind it the key r.
        query_norm: norm of ``a``; None without one.
        query: full name of the linear behind that norm; None if ``inputs`` give the queries.
        latent_norm: norm of the latent.
        expansion: full name of the linear without bias whose rows are K_0, V_0, K_1, V_1 and so on.
        output: full name of the output projection.
        heads: H.
        plain_dim: N, channels of a head's query that are not rotated; they come first.
        rotated_dim: channels of r.
        value_dim: V.
        latent_dim: L.
        scale: factor on the dot products.
        rotary: rotary embedding of queries' rotated channels and of r; None without one.
    """

    inputs: Slices
    query_norm: Norm | None
    query: str | None
    latent_norm: Norm
    expansion: str
    output: str
    heads: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
    latent_dim: int
    scale: float
    rotary: Rotary | None

    @property
    def cached(self) -> int:
        """Channels of a token in the cache: c and r."""
        return self.latent_dim + self.rotated_dim


@dataclass(frozen=True)
class MLP:
    """``down(activation(gate_scale * gate(x)) * up(x))``, or ``down(activation(up(x)))`` without a gate.

    Attributes:
        inputs: gate and up, or up alone.
        gated: whether there is a gate.
        down: full name of the last projection.
        activation: ``silu``, ``gelu``, ``gelu_tanh``, ``relu`` or ``relu2``.
        gate_scale: factor on the gate, or on ``up`` without a gate.
    """

    inputs: Slices
    gated: bool
    down: str
    activation: Activation
    gate_scale: float = 1.0


@dataclass(frozen=True)
class Groups:
    """Groups of neighbouring experts. A token chooses some groups first, and experts only inside them.

    Attributes:
        count: number of groups, all of one size.
        kept: number of groups with the highest values, in which a token's experts are chosen.
        zeroed: whether experts of the other groups take part with 0 instead of being excluded, which matters
            where all remaining ``score + correction`` are negative.
        summed: number of highest ``score + correction`` of a group that are summed to its value: 2 with a
            correction, 1 without.
    """

    count: int
    kept: int
    zeroed: bool = False
    summed: int = 2

    def limited(self, decisive: Tensor) -> Tensor:
        """``decisive``, the ``score + correction`` [..., experts], with -inf or 0 for experts of groups that
        are not kept."""
        apart = decisive.view(*decisive.shape[:-1], self.count, -1)
        kept = apart.topk(self.summed, -1).values.sum(-1).topk(self.kept, -1).indices
        left_out = torch.ones_like(apart[..., 0], dtype=torch.bool).scatter_(-1, kept, False)
        return apart.masked_fill(left_out[..., None], 0.0 if self.zeroed else -torch.inf).flatten(-2)


@dataclass(frozen=True)
class Router:
    """The choice of a token's experts, and their weights.

    ``logits = W x + bias`` become ``scores``. The ``top`` experts of highest score, or with a correction of
    highest ``score + correction`` (or ``logit + correction``), are chosen. The weight of a chosen expert is
    ``scale * score``, or ``scale * score / (sum of the chosen scores)`` if ``normalised``; a correction does
    not change it. (A softmax over the chosen logits equals a normalised one over all.)

    Attributes:
        module: full name of the module whose ``weight`` [experts, hidden] makes the logits, in its dtype.
        norm: norm of the residual stream that the router reads; None if it reads what the experts read.
        input_scale: full name of the parameter [hidden] that multiplies the norm's result; None without one.
        input_factor: factor on that result.
        expert_scale: full name of the parameter [experts] that multiplies experts' weights; None without one.
        experts: number of experts.
        top: number of experts per token.
        scoring: ``softmax`` over all experts, or ``sigmoid`` of each.
        normalised: whether weights are divided by their sum.
        scale: factor on the weights.
        correction: full name of the buffer or parameter of ``experts`` numbers that is added to scores for
            the choice; None without one.
        corrects_logits: whether it is added to logits instead.
        groups: groups that limit the choice; None without groups.
        wide: whether logits are computed and kept in float32, without rounding to the activations' dtype.
        bias: full name of the parameter [experts] that is added to the logits; None without one.
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
    bias: str | None = None
    norm: Norm | None = None
    input_scale: str | None = None
    input_factor: float = 1.0
    expert_scale: str | None = None
    corrects_logits: bool = False


@dataclass(frozen=True)
class Mixture:
    """A routed MLP: ``out(sum_s weight_s * expert_s(into(x)))``, plus a shared MLP for every token.

    Attributes:
        router: choice of the experts, from x.
        experts: full name of the module of experts, which takes hidden states [T, channels], the numbers of
            the chosen experts [T, top] and their weights.
        activation: activation between the products of an expert.
        shared: MLP for every token, whose result is added; None without one.
        shared_gate: full name of a linear with one output, whose sigmoid multiplies the result of ``shared``;
            None for a factor of 1.
        gated: whether an expert's first product has a gate, which the activation is applied to.
        into, out: full names of linears to the experts' fewer channels and back; None without.
        norm: norm of the residual stream that the experts read, where only the shared MLP reads that of the
            layer; None if both read the same.
        post_norm, shared_post_norm: norms of the experts' and of the shared MLP's results before their sum;
            both or none.
    """

    router: Router
    experts: str
    activation: ExpertActivation
    shared: MLP | None = None
    shared_gate: str | None = None
    gated: bool = True
    into: str | None = None
    out: str | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    shared_post_norm: Norm | None = None


@dataclass(frozen=True)
class LayerInputs:
    """Vectors of P channels for each layer, made from a token and its embedding (Gemma 3n and 4).

    With e what enters the first block, the vector of layer l is the l-th run of P channels of::

        scale * (norm(projection_scale * projection(e)) + embedding_scale * embedding(token))

    Attributes:
        embedding: full name of the embedding of tokens with channels for all layers.
        embedding_scale, projection_scale, scale: factors of the formula.
        projection: full name of the linear without bias.
        norm: norm of each P channels.
    """

    embedding: str
    embedding_scale: float
    projection: str
    projection_scale: float
    norm: Norm
    scale: float

    @property
    def width(self) -> int:
        """P, channels of a layer."""
        return self.norm.width


@dataclass(frozen=True)
class InputGate:
    """The last part of a block that reads the layer's vector of :class:`LayerInputs`.

    With x the residual stream::

        x = x + norm(output(activation(gate(x)) * vector))

    Attributes:
        gate, output: full names of linears.
        activation: activation of the gate.
        norm: norm of the result; None without one.
    """

    gate: str
    activation: Activation
    output: str
    norm: Norm | None


@dataclass(frozen=True)
class Layer:
    """One decoder block.

    With x the residual stream::

        a = attention(attention_norm(x));  x = x + attention_scale * post_attention_norm(a)
        m = mlp(mlp_norm(x));              x = x + mlp_scale * post_mlp_norm(m)

    In a parallel block both read the same x and have one factor. A norm that is None is left out. A layer
    without attention or without an MLP has only the other line. A mixer beside attention reads what attention
    reads, and its result is added to x too, with a factor of its own.

    Attributes:
        name: full module name of the block.
        attention: attention, or latent attention, a delta net, a Mamba-2 mixer or a gated convolution in its
            place; None without one.
        mlp: MLP, or routed experts; None without one.
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm: norms of the formulas above.
        parallel: whether attention and MLP read the same x.
        attention_scale, mlp_scale: factors on the results of attention and MLP before they are added.
        beside: mixer beside attention, or None.
        beside_scale: factor on the result of that mixer.
        input_gate: part behind the MLP that reads the layer's own vector; None without one.
        stream_scale: full name of the buffer of one number that multiplies the residual stream at the end of
            the block; None without one.
    """

    name: str
    attention: Attention | LatentAttention | DeltaNet | Mamba | GatedConvolution | None
    mlp: MLP | Mixture | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    parallel: bool = False
    attention_scale: float = 1.0
    mlp_scale: float = 1.0
    beside: Mamba | None = None
    beside_scale: float = 1.0
    input_gate: InputGate | None = None
    stream_scale: str | None = None


@dataclass(frozen=True)
class Anatomy:
    """A whole decoder.

    Attributes:
        embedding: full name of the token embedding.
        embedding_scale: factor on the embedding's rows, applied in the model's dtype.
        positions: full name of a learned position embedding, or None.
        positions_offset: number added to a position before it is looked up there.
        embedding_norm: norm after the embedding, or None.
        layers: the blocks in order.
        final_norm: norm before the head, or None.
        head: full name of the output head (its weight may be tied to the embedding).
        logit_scale: factor on the logits.
        layer_inputs: vectors that blocks read besides the residual stream; None without them.
        logit_softcap: cap of the logits after ``logit_scale``, as :attr:`Attention.softcap`; None for no cap.
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
    layer_inputs: LayerInputs | None = None


@dataclass(frozen=True)
class Unrecognised:
    """Why a model could not be recognised.

    Attributes:
        part: full name of the module or config entry that is not understood.
        reason: the reason in one clause.
    """

    part: str
    reason: str
