"""Tensors of a checkpoint that its model leaves out on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from marlinq.checkpoint import find_draft_head
from marlinq.models.blueprint import Blueprint


def left_out(blueprint: Blueprint, names: Collection[str]) -> Callable[[str], bool]:
    """A function that says whether a stored tensor, one of ``names``, is none of the model's on purpose.

    Its class ignores the tensor, or it belongs to a draft head in a layer behind the model's last.
    """
    unread = unread_names(blueprint)
    head = find_draft_head(names)
    if head is None or head.layer in range(len(blueprint.blocks)):
        return unread
    parts = (head.block, *(f"{part}." for part in head.outside))
    return lambda name: name.startswith(parts) or unread(name)


def unread_names(blueprint: Blueprint) -> Callable[[str], bool]:
    """A function that says whether the model's class ignores a stored tensor of a name: masks and frequencies
    that old checkpoints hold, whatever their values."""
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in blueprint.ignored))
    return lambda name: ignored.search(name) is not None
