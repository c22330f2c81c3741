"""Whether ``config.json`` ties the output head to the embedding.

A quantised head has a weight of its own. Loaders that are told of a tie build the head from the embedding
and leave the head's tensors unread (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY = "tie_word_embeddings"
_INNER = "text_config"


def says_tied(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` says so; a model's own default is not known here."""
    inner = config.get(_INNER)
    return config.get(_KEY) is True or (isinstance(inner, dict) and inner.get(_KEY) is True)


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` that says the head is tied to nothing, wherever a loader looks."""
    changed = {**config, _KEY: False}
    inner = config.get(_INNER)
    if isinstance(inner, dict) and _KEY in inner:
        changed[_INNER] = {**inner, _KEY: False}
    return changed
