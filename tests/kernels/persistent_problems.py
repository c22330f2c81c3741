"""Layers of random weights for the persistent decode step, and the same step in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels import Operand
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.launch.persistent import BiasedOperand, LayerOperands, Model

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: channels of the residual stream and of the MLP, heads and their channels, and a
    cache's positions."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int


LLAMA_3_8B = Sizes(4096, 14336, 32, 8, 128, 4352)


@dataclass(frozen=True)
class Features:
    """Features of a layer.

    Attributes:
        group: channels that share a scale.
        zeros, bias, head_norms, post_norms: whether there are any.
        dtype: dtype of activations.
        window: window of the attention.
    """

    group: int = 128
    zeros: bool = False
    bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    dtype: torch.dtype = torch.float16
    window: int | None = None


def bound(dtype: torch.dtype, layers: int) -> float:
    """Largest relative distance between a step and :class:`Reference` that rounding explains.

    Both round at the same places, but for the input of a single row's products. Sums in float32 flip some of
    these roundings, each of which is eps / sqrt(12) in the mean. A layer has a dozen, which add like random
    numbers: one eps a layer, and layers add likewise.
    """
    return float(torch.finfo(dtype).eps * layers**0.5)


def random_operand(
    k: int, n: int, features: Features, device: torch.device, size: float = 1.0
) -> BiasedOperand:
    """Random codes, whose products of unit activations have about the given ``size``."""
    groups = k // features.group
    words = torch.randint(-(2**31), 2**31, (k // 16, 2 * n), dtype=torch.int32, device=device)
    unit = size / (4.6 * k**0.5)
    scales = (unit * (0.5 + torch.rand(groups, n, device=device))).to(features.dtype)
    # Without zero points codes count from 8, and their mean is 7.5: signs keep sums from growing.
    scales *= torch.randint(0, 2, (groups, n), device=device) * 2 - 1
    zeros = torch.randint(4, 12, (groups, n), device=device).to(features.dtype) if features.zeros else None
    bias = (torch.randn(n, device=device) / 8).to(features.dtype) if features.bias else None
    granularity = Granularity.group(features.group)
    return BiasedOperand(Operand.whole(INT4, granularity, words, scales, zeros), bias)


def random_layer(sizes: Sizes, features: Features, rows: int, device: torch.device) -> LayerOperands:
    """A layer and its full cache, with a rotary embedding of its own."""
    made = partial(random_operand, features=features, device=device)

    def gamma(channels: int) -> Tensor:
        return 0.5 + torch.rand(channels, device=device)

    shape = (rows, sizes.kv_heads, sizes.capacity, sizes.head_dim)
    attention = sizes.heads * sizes.head_dim
    return LayerOperands(
        made(sizes.hidden, attention + 2 * sizes.kv_heads * sizes.head_dim),
        made(attention, sizes.hidden, size=0.5),
        made(sizes.hidden, 2 * sizes.intermediate),
        made(sizes.intermediate, sizes.hidden, size=0.5),
        gamma(sizes.hidden),
        gamma(sizes.hidden),
        torch.randn(shape, device=device).to(features.dtype),
        torch.randn(shape, device=device).to(features.dtype),
        *rotary_tables(sizes, float(10 ** (2 + 3 * torch.rand(()))), device),
        gamma(sizes.head_dim) if features.head_norms else None,
        gamma(sizes.head_dim) if features.head_norms else None,
        gamma(sizes.hidden) if features.post_norms else None,
        gamma(sizes.hidden) if features.post_norms else None,
        features.window,
    )


def rotary_tables(sizes: Sizes, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [capacity, D / 2]."""
    half = sizes.head_dim // 2
    angles = torch.arange(sizes.capacity, device=device)[:, None] * base ** (
        -torch.arange(half, device=device) / half
    )
    return angles.cos().contiguous(), angles.sin().contiguous()


class Reference:
    """The step in float64, rounded where the kernel rounds, but for the input of a single row's products.

    Args:
        model: sizes and features that layers share.
        lengths: positions in the cache of every row.
        dtype: dtype of activations.
    """

    def __init__(self, model: Model, lengths: list[int], dtype: torch.dtype) -> None:
        self._model, self._lengths, self._dtype = model, lengths, dtype

    def step(self, layers: list[LayerOperands], hidden: Tensor) -> Tensor:
        """Rows that leave the last layer; caches are appended to."""
        x = hidden.double()
        for layer in layers:
            given = self._product(self._attend(layer, self._norm(x, layer.attention_gamma)), layer.output)
            x = self._round(x + self._post(given, layer.post_attention_gamma))
            made = self._product(self._norm(x, layer.mlp_gamma), layer.gate_up).view(x.shape[0], -1, 2, 64)
            gate, up = made[:, :, 0].flatten(1), made[:, :, 1].flatten(1)
            inner = self._round(self._round(_ACTIVATIONS[self._model.activation](gate)) * up)
            x = self._round(x + self._post(self._product(inner, layer.down), layer.post_mlp_gamma))
        return x

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self._dtype).double()

    def _norm(self, x: Tensor, gamma: Tensor, eps: float | None = None) -> Tensor:
        normal = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + (eps or self._model.eps))
        return self._round((self._round(normal) if self._model.narrow_first else normal) * gamma.double())

    def _post(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        return x if gamma is None else self._norm(x, gamma)

    def _product(self, x: Tensor, operand: BiasedOperand) -> Tensor:
        made = x @ operand.weight.dequantize(torch.float32).double()
        return self._round(made if operand.bias is None else made + operand.bias.double())

    def _rotate(self, x: Tensor, layer: LayerOperands) -> Tensor:
        lower, upper = x.chunk(2, -1)
        c, s = (table[self._lengths].double()[:, None] for table in (layer.cosines, layer.sines))
        return self._round(torch.cat([lower * c - upper * s, upper * c + lower * s], -1))

    def _attend(self, layer: LayerOperands, x: Tensor) -> Tensor:
        model, head_dim = self._model, layer.keys.shape[3]
        made = self._product(x, layer.qkv).view(x.shape[0], -1, head_dim)
        q, k, v = torch.split(made, [model.heads, model.kv_heads, model.kv_heads], 1)
        if layer.query_gamma is not None and layer.key_gamma is not None:
            q = self._norm(q, layer.query_gamma, model.query_eps)
            k = self._norm(k, layer.key_gamma, model.query_eps)
        q, k = self._rotate(q, layer), self._rotate(k, layer)
        out = torch.empty_like(q)
        for row, length in enumerate(self._lengths):
            layer.keys[row, :, length] = k[row].to(self._dtype)
            layer.values[row, :, length] = v[row].to(self._dtype)
            first = 0 if layer.window is None else max(0, length + 1 - layer.window)
            keys, values = (
                cache[row, :, first : length + 1].double().repeat_interleave(model.heads // model.kv_heads, 0)
                for cache in (layer.keys, layer.values)
            )
            scores = torch.einsum("hd,hld->hl", q[row], keys) * model.scale
            if model.softcap is not None:
                scores = model.softcap * torch.tanh(scores / model.softcap)
            out[row] = torch.einsum("hl,hld->hd", scores.softmax(-1), values)
        return self._round(out.flatten(1))
