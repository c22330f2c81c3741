"""Why ``load`` refuses a checkpoint's files or tensors, by building its model without weights.

That imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from marlinq.checkpoint import (
    Checkpoint,
    QuantizedCheckpoint,
    doubtful_tensors,
    without_quantization_config,
)
from marlinq.core.errors import MarlinqError

if TYPE_CHECKING:
    from marlinq.models import Blueprint


def doubtful_refusal(checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None) -> str | None:
    """:func:`load_refusal`, asked only where the name or shape of an unquantised tensor is in doubt."""
    names = checkpoint.tensors if quantized is None else quantized.passthrough
    return load_refusal(checkpoint, quantized) if doubtful_tensors(checkpoint, names) else None


def load_refusal(checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None) -> str | None:
    """Why ``load`` refuses the names or shapes of the tensors; None if it does not, or the model can't be
    built. Building it takes seconds."""
    blueprint = _blueprint(checkpoint)
    return None if isinstance(blueprint, str) else _mismatch(blueprint, checkpoint, quantized)


def build_refusal(checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None) -> str | None:
    """:func:`load_refusal`, or why the model can't be built or a file beside it not be read."""
    blueprint = _blueprint(checkpoint)
    if isinstance(blueprint, str):
        return blueprint
    return _mismatch(blueprint, checkpoint, quantized) or _unreadable(checkpoint)


def _blueprint(checkpoint: Checkpoint) -> Blueprint | str:
    """Structure of the model, or why it can't be built."""
    from marlinq.models import build_blueprint

    config = without_quantization_config(checkpoint.config)
    try:
        return build_blueprint(config, source=str(checkpoint.path), tensors=checkpoint.tensors)
    except MarlinqError as refusal:
        return str(refusal).removeprefix(f"{checkpoint.path}: ")


def _mismatch(
    blueprint: Blueprint, checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None
) -> str | None:
    """Why names or shapes of the tensors are not the model's, or None."""
    from marlinq.runtime.loading import match_tensors

    return _refusal(checkpoint, lambda: match_tensors(blueprint, checkpoint, quantized))


def _unreadable(checkpoint: Checkpoint) -> str | None:
    """Why the tokenizer or the generation config can't be read, or None."""
    from marlinq.runtime.loading import read_generation_config, read_tokenizer

    def read() -> None:
        read_tokenizer(checkpoint, trust_remote_code=False)
        read_generation_config(checkpoint)

    return _refusal(checkpoint, read)


def _refusal(checkpoint: Checkpoint, step: Callable[[], object]) -> str | None:
    """Why a step of ``load`` fails, without the folder's name; None if it does not."""
    try:
        step()
    except MarlinqError as refusal:
        return str(refusal).removeprefix(f"{checkpoint.path}: ")
    return None
