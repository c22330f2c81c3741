"""Refusals that need config.json alone, before transformers is imported and the model is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marlinq.core.errors import UnsupportedError
from marlinq.operations.quantize.recipe import Recipe, common_group_size

_TEXT_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Keys of config.json that hold the language model's part in wrappers of several models."""


def refuse_by_config(folder: Path, config: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuses what can't be quantised whatever else the folder holds.

    What passes may still be refused by the plan, which knows every module's shape.

    Args:
        folder: path of the checkpoint, for messages.
        config: its config.json.
        recipe: settings of the run.

    Raises:
        UnsupportedError: its hidden size is no multiple of the group size.
    """
    width = _hidden_size(config)
    size = recipe.group_size
    # An override may keep or change every module that reads the hidden states.
    if recipe.overrides or width is None or not isinstance(size, int) or size <= 0 or width % size == 0:
        return
    fitting = common_group_size([width])
    hint = f"--group-size auto takes {fitting} or less" if fitting else "no group size divides it"
    raise UnsupportedError(
        f"{folder}/config.json: hidden_size {width} is not a multiple of group size {size}; {hint}"
    )


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    """Channels that enter the attention of every block, where the config says so plainly."""
    for part in (config, *(config.get(key) for key in _TEXT_CONFIGS)):
        width = part.get("hidden_size") if isinstance(part, Mapping) else None
        if type(width) is int and width > 0:
            return width
    return None
