"""Refusals from config.json alone, made before transformers is imported and the model is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marlinq.core.errors import UnsupportedError
from marlinq.operations.quantize.module_settings import common_group_size
from marlinq.operations.quantize.recipe import Recipe

_TEXT_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Keys of config.json that hold the language model's config in multi-modal models."""


def refuse_by_config(folder: Path, config: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuses a model that can't be quantised, as far as config.json tells.

    The plan, which knows every module's shape, may refuse more.

    Args:
        folder: path of the checkpoint, for messages.
        config: the checkpoint's config.json.
        recipe: settings of the run.

    Raises:
        UnsupportedError: the hidden size is not a multiple of the group size.
    """
    width = _hidden_size(config)
    size = recipe.group_size
    # With overrides, modules that read the hidden states may have other group sizes or stay unquantised.
    if recipe.overrides or width is None or not isinstance(size, int) or size <= 0 or width % size == 0:
        return
    fitting = common_group_size([width])
    hint = f"--group-size auto takes {fitting} or less" if fitting else "no group size divides it"
    raise UnsupportedError(
        f"{folder}/config.json: hidden_size {width} is not a multiple of group size {size}; {hint}"
    )


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    """The config's ``hidden_size``, or None."""
    for part in (config, *(config.get(key) for key in _TEXT_CONFIGS)):
        width = part.get("hidden_size") if isinstance(part, Mapping) else None
        if type(width) is int and width > 0:
            return width
    return None
