"""Operands of the persistent step: a layer's weights, norms and cache, and what all layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from marlinq.kernels.contract.operand import Operand

Activation = Literal["silu", "gelu_tanh"]


class BiasedOperand(NamedTuple):
    """A weight and the bias of its product.

    Attributes:
        weight: quantised weight without padding or order, with scales of groups.
        bias: [N] in the dtype of the scales, or None.
    """

    weight: Operand
    bias: Tensor | None = None

    @property
    def channels(self) -> int:
        """K."""
        return self.weight.padded_shape[0]

    @property
    def columns(self) -> int:
        """N."""
        return self.weight.padded_shape[1]


@dataclass(frozen=True)
class LayerOperands:
    """Weights, norms and cache of one layer.

    Attributes:
        qkv: projections of queries, keys and values, columns ``[q | k | v]``.
        output: projection behind the attention.
        gate_up: gate and up projections; 64 columns of gate, 64 of up and so on, ``[g0 u0 g1 u1 ...]``.
        down: last projection of the MLP.
        attention_gamma: float32 [H], factors of the norm before qkv, offset included.
        mlp_gamma: float32 [H], factors of the norm before gate_up, offset included.
        keys: cache of keys [1, KV, L, D], contiguous. Must be finite everywhere: positions past the length
            are read and multiplied by 0.
        values: cache of values [1, KV, L, D], contiguous and finite like ``keys``.
        cosines: float32 [positions, D/2] of the rotary embedding.
        sines: float32 [positions, D/2] of the rotary embedding.
        query_gamma: float32 [D], factors of the queries' norm, or None.
        key_gamma: float32 [D], factors of the keys' norm, or None.
        post_attention_gamma: float32 [H], factors of a norm behind ``output``, or None.
        post_mlp_gamma: float32 [H], factors of a norm behind ``down``, or None.
        window: positions that a query sees at most, its own included; None for all.
    """

    qkv: BiasedOperand
    output: BiasedOperand
    gate_up: BiasedOperand
    down: BiasedOperand
    attention_gamma: Tensor
    mlp_gamma: Tensor
    keys: Tensor
    values: Tensor
    cosines: Tensor
    sines: Tensor
    query_gamma: Tensor | None = None
    key_gamma: Tensor | None = None
    post_attention_gamma: Tensor | None = None
    post_mlp_gamma: Tensor | None = None
    window: int | None = None

    @property
    def operands(self) -> tuple[BiasedOperand, BiasedOperand, BiasedOperand, BiasedOperand]:
        """The four weights in the order in which a layer uses them."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class Model:
    """Sizes and features that all layers share.

    Attributes:
        heads: heads of queries.
        kv_heads: heads of keys and values.
        eps: number added to the mean square in the layers' norms.
        scale: factor on the dot products of queries and keys.
        activation: function of the gate.
        narrow_first: True if norms round before they multiply with gamma
            (:class:`marlinq.models.anatomy.Norm`).
        softcap: c of scores ``c * tanh(score / c)``; None for uncapped scores.
        query_eps: number added to the mean square in the norms of queries and keys.
        post_norms: True if norms follow the output projection and the down projection.
    """

    heads: int
    kv_heads: int
    eps: float
    scale: float
    activation: Activation = "silu"
    narrow_first: bool = True
    softcap: float | None = None
    query_eps: float = 1e-6
    post_norms: bool = False
