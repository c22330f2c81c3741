"""Tensors of a tuning run in the unfinished folder: its state at times, its result before it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from marlinq.checkpoint import CheckpointWriter
from marlinq.core.errors import OutputError
from marlinq.core.plain_values import load_json

STATE = "tuning.safetensors"
RESULT = "tuned.safetensors"
_FACTS = "marlinq"

_Found = TypeVar("_Found")


def keep(
    writer: CheckpointWriter, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Puts tensors and JSON values into a file of the unfinished folder, durably, whole or not at all."""
    own = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    writer.keep_bytes(name, safetensors.torch.save(own, {_FACTS: json.dumps(facts)}))


def kept(
    writer: CheckpointWriter, name: str, take: Callable[[dict[str, Tensor], dict[str, Any]], _Found]
) -> _Found | None:
    """What :func:`keep` left, as ``take`` understands it; None where it left nothing.

    Args:
        writer: writer of the folder.
        name: name of the file.
        take: called with the tensors and the values; raises ValueError, LookupError or TypeError where they
            are not what it expects.

    Raises:
        OutputError: the file is damaged.
    """
    data = writer.kept_bytes(name)
    if data is None:
        return None
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        facts = load_json(load_json(data[8 : 8 + length])["__metadata__"][_FACTS].encode())
        return take(tensors, facts)
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError):
        raise OutputError(
            f"{writer.partial / name}: is damaged; remove {writer.partial} and start over"
        ) from None
