"""What the persistent step computes with: a layer's weights, norms and cache, and what layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Operand:
    """A quantised weight as :func:`marlinq.kernels.ops.w4a16.w4a16_gemm` takes it, group scales only.

    Attributes:
        words: int32 [K/16, 2N].
        scales: [K/group, N] in stored order.
        zeros: as ``scales``, or None.
        bias: [N], or None.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None

    @property
    def channels(self) -> int:
        """K."""
        return self.words.shape[0] * 16

    @property
    def columns(self) -> int:
        """N."""
        return self.words.shape[1] // 2

    @property
    def group_size(self) -> int:
        """Channels that share a scale."""
        return self.channels // self.scales.shape[0]


@dataclass(frozen=True)
class LayerOperands:
    """What one layer computes with.

    Attributes:
        qkv: columns ``[q | k | v]``.
        output: the projection behind the attention.
        gate_up: columns in turns of 64, ``[g0 u0 g1 u1 ...]``.
        down: the last projection.
        attention_gamma, mlp_gamma: float32 [H], offsets included.
        keys, values: the cache [B, KV, L, D], contiguous; finite everywhere, since positions that are not
            there yet are read and not counted.
        cosines, sines: float32 [positions, D/2], of the rotary embedding.
        query_gamma, key_gamma: float32 [D], or None.
        post_attention_gamma, post_mlp_gamma: float32 [H], of norms behind the output and the last projection;
            None where the model has none.
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
        """In the order of their use."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class Model:
    """What all layers have in common.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        eps: of the layers' norms.
        scale: factor on the dot products of queries and keys.
        activation: of the gate.
        narrow_first: norms round before they multiply with gamma (:class:`marlinq.models.anatomy.Norm`).
        softcap: of the scores; None for no cap.
        query_eps: of query and key norms.
        post_norms: whether norms follow the output projection and the last one.
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
