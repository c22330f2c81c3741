"""Shapes of the expert layers of well-known mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marlinq.core.errors import UsageError


@dataclass(frozen=True)
class ExpertsLayer:
    """A layer of E experts with I intermediate channels for H hidden channels, of which a token takes T."""

    name: str
    experts: int
    top: int
    hidden: int
    inner: int


EXPERT_LAYERS = {
    layer.name: layer
    for layer in (
        ExpertsLayer("qwen3-30b-a3b", 128, 8, 2048, 768),
        ExpertsLayer("qwen3.6-35b-a3b", 256, 8, 2048, 512),
        ExpertsLayer("deepseek-v3-tp8", 256, 8, 7168, 256),
        ExpertsLayer("mixtral-8x7b", 8, 2, 4096, 14336),
    )
}
"""Model -> layer on one GPU; for DeepSeek-V3 an eighth of every expert."""


def layers_named(names: Sequence[str]) -> list[ExpertsLayer]:
    """Layers by name.

    Raises:
        UsageError: an unknown name.
    """
    for name in names:
        if name not in EXPERT_LAYERS:
            raise UsageError(f"model {name!r} has no experts; expected one of {', '.join(EXPERT_LAYERS)}")
    return [EXPERT_LAYERS[name] for name in names]
