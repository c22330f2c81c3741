"""Tensors that ``load`` refuses, found without importing torch or transformers where names are usual."""

from __future__ import annotations

from marlinq.checkpoint import (
    Checkpoint,
    QuantizedCheckpoint,
    doubtful_tensors,
    without_quantization_config,
)
from marlinq.core.errors import MarlinqError


def doubtful_refusal(checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None) -> str | None:
    """:func:`load_refusal`, asked only where the name or shape of an unquantised tensor is in doubt."""
    names = checkpoint.tensors if quantized is None else quantized.passthrough
    return load_refusal(checkpoint, quantized) if doubtful_tensors(checkpoint, names) else None


def load_refusal(checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None) -> str | None:
    """Why ``load`` refuses the names or shapes of the tensors; None if it does not, or the model can't be
    built. Building it takes seconds."""
    from marlinq.models import build_blueprint
    from marlinq.runtime.loading import match_tensors

    config = without_quantization_config(checkpoint.config)
    try:
        blueprint = build_blueprint(config, source=str(checkpoint.path), tensors=checkpoint.tensors)
    except MarlinqError:
        return None
    try:
        match_tensors(blueprint, checkpoint, quantized)
    except MarlinqError as refusal:
        return str(refusal).removeprefix(f"{checkpoint.path}: ")
    return None
