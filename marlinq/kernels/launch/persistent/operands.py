"""Operands of the persistent step: a layer's weights, norms and cache, and what all layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from marlinq.kernels.contract.weight_formats import WeightFormat

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Operand:
    """A quantised weight as :func:`marlinq.kernels.ops.w4a16.w4a16_gemm` takes it, group scales only.

    Attributes:
        format: weight format of the words; the kernel refuses all but int4.
        words: int32 [K / format.row_channels, N * format.row_words].
        scales: FP16 or BF16 [K/group, N] in stored order.
        zeros: zero points like ``scales``, or None.
        bias: [N] in the dtype of ``scales``, or None.
    """

    format: WeightFormat
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None

    @property
    def channels(self) -> int:
        """K."""
        return self.format.shape(self.words)[0]

    @property
    def columns(self) -> int:
        """N."""
        return self.format.shape(self.words)[1]

    @property
    def group_size(self) -> int:
        """Channels that share a scale."""
        return self.channels // self.scales.shape[0]


@dataclass(frozen=True)
class LayerOperands:
    """Weights, norms and cache of one layer.

    Attributes:
        qkv: projections of queries, keys and values, columns ``[q | k | v]``.
        output: projection behind the attention.
        gate_up: gate and up projections, columns in turns of 64, ``[g0 u0 g1 u1 ...]``.
        down: last projection of the MLP.
        attention_gamma: float32 [H], factors of the norm before qkv, offset included.
        mlp_gamma: float32 [H], factors of the norm before gate_up, offset included.
        keys: the cache of keys [1, KV, L, D], contiguous. Finite everywhere: positions past the length are
            read, with weight 0.
        values: the cache of values, as ``keys``.
        cosines: float32 [positions, D/2] of the rotary embedding.
        sines: float32 [positions, D/2] of the rotary embedding.
        query_gamma: float32 [D], factors of the queries' norm, or None.
        key_gamma: float32 [D], factors of the keys' norm, or None.
        post_attention_gamma: float32 [H], factors of a norm behind ``output``, or None.
        post_mlp_gamma: float32 [H], factors of a norm behind ``down``, or None.
        window: positions that a query sees at most, its own included; None for all.
    """

    qkv: Operand
    output: Operand
    gate_up: Operand
    down: Operand
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
    def operands(self) -> tuple[Operand, Operand, Operand, Operand]:
        """The four weights in the order of their use."""
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
