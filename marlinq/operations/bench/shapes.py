"""Shapes of the linears of well-known decoders, derived from their published dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from marlinq.core.errors import UsageError


@dataclass(frozen=True)
class LinearSize:
    """A linear: K inputs, N outputs."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a model's blocks from its ``config.json``; ``intermediate`` is that of an expert in a
    mixture."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int

    def layers(self, model: str) -> tuple[LinearSize, ...]:
        """The four products of a block; q, k, v and gate, up are joined, as in servers."""
        attention = self.heads * self.head_size
        return (
            LinearSize(f"{model} qkv", attention + 2 * self.kv_heads * self.head_size, self.hidden),
            LinearSize(f"{model} o", self.hidden, attention),
            LinearSize(f"{model} gate_up", 2 * self.intermediate, self.hidden),
            LinearSize(f"{model} down", self.hidden, self.intermediate),
        )


MODELS = {
    "gemma-2-9b": Dimensions(3584, 14336, heads=16, kv_heads=8, head_size=256),
    "llama-3-70b": Dimensions(8192, 28672, heads=64, kv_heads=8, head_size=128),
    "llama-3-8b": Dimensions(4096, 14336, heads=32, kv_heads=8, head_size=128),
    "mistral-7b": Dimensions(4096, 14336, heads=32, kv_heads=8, head_size=128),
    "mixtral-8x7b": Dimensions(4096, 14336, heads=32, kv_heads=8, head_size=128),
    "qwen3-32b": Dimensions(5120, 25600, heads=64, kv_heads=8, head_size=128),
    "qwen3-8b": Dimensions(4096, 12288, heads=32, kv_heads=8, head_size=128),
    "smollm2-135m": Dimensions(576, 1536, heads=9, kv_heads=3, head_size=64),
}


def dividing_group_size(models: Iterable[str], shapes: Iterable[str]) -> int:
    """The largest of 128, 64 and 32 that divides the input channels of every layer.

    Raises:
        UsageError: as :func:`layers_of`.
    """
    layers = layers_of(models, shapes, -1)
    return next(size for size in (128, 64, 32) if not any(layer.k % size for layer in layers))


def layers_of(models: Iterable[str], shapes: Iterable[str], group_size: int) -> tuple[LinearSize, ...]:
    """The layers of ``models`` and of ``shapes`` such as ``4096x4096`` or ``NAME=4096x4096`` (N x K).

    Raises:
        UsageError: an unknown model, a malformed shape, or one the kernels or the group size can't divide.
    """
    layers: list[LinearSize] = []
    for model in models:
        if model not in MODELS:
            raise UsageError(f"model {model!r} is not known; expected one of {', '.join(MODELS)}")
        layers += MODELS[model].layers(model)
    for text in shapes:
        match = re.fullmatch(r"(?:([^=]+)=)?(\d+)x(\d+)", text)
        if match is None:
            raise UsageError(f"shape {text!r}: expected NxK or NAME=NxK, such as o=4096x4096")
        layers.append(LinearSize(match[1] or text, int(match[2]), int(match[3])))
    for layer in layers:
        if layer.n < 64 or layer.k < 64 or layer.n % 64 or layer.k % 64:
            raise UsageError(f"{layer.name}: N={layer.n} and K={layer.k} must be positive multiples of 64")
        if group_size > 0 and layer.k % group_size:
            raise UsageError(
                f"{layer.name}: K={layer.k} is not a multiple of group size {group_size}; choose a smaller"
            )
    if not layers:
        raise UsageError("nothing to measure; name a model or a shape")
    return tuple(layers)
