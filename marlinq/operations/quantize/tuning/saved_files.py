"""Files of a tuning run in the unfinished folder: its latest state, and its result before tensors are
overwritten."""

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
    """Writes tensors and JSON values to a file of the unfinished folder, durably and atomically."""
    own = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    writer.keep_bytes(name, safetensors.torch.save(own, {_FACTS: json.dumps(facts)}))


def kept(
    writer: CheckpointWriter, name: str, take: Callable[[dict[str, Tensor], dict[str, Any]], _Found]
) -> _Found | None:
    """The contents of a file that :func:`keep` wrote, converted by ``take``; None where there is no file.

    Args:
        writer: writer of the folder.
        name: name of the file.
        take: function of the tensors and the values; raises ValueError, LookupError or TypeError where they
            are not valid.

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
