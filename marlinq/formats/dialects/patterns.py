"""Module names as patterns: one pattern for many names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Loaders that fuse these match rules against the fused name, others against the parts (docs/formats.md).
FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)
"""Fused linears of serving engines: the fused name and the names of its parts."""


def in_block(name: str) -> bool:
    """Whether ``name`` is a module of one of several numbered blocks."""
    return re.search(r"\.\d+\.", name) is not None


def inside_block(name: str) -> str:
    """``model.layers.3.mlp.up_proj`` -> ``mlp.up_proj``."""
    return re.split(r"\.\d+\.", name, maxsplit=1)[-1]


def is_head(name: str) -> bool:
    """Whether ``name`` is an output head's: ``embed_out`` is what GPT-NeoX files call theirs."""
    return name.rsplit(".", maxsplit=1)[-1] in ("lm_head", "embed_out")


def names_pattern(members: Sequence[str], others: Iterable[str]) -> str:
    """One regular expression that matches exactly ``members``, and the fused name of a complete set of parts.

    Members that stand in several blocks are written once with the block numbers as an alternation.
    """
    others = set(others) - set(members)
    names = list(members)
    for fused, parts in FUSED:
        for name in members:
            stem, _, last = name.rpartition(".")
            if last == parts[0] and not any(f"{stem}.{part}" in others for part in parts):
                names.append(f"{stem}.{fused}")
    blocks: dict[tuple[str, str], list[str]] = {}
    plain: list[str] = []
    for name in names:
        found = re.fullmatch(r"(.*?)\.(\d+)\.(.*)", name)
        if found is None:
            plain.append(re.escape(name))
        else:
            blocks.setdefault((found[1], found[3]), []).append(found[2])
    by_numbers: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (stem, inner), numbers in blocks.items():
        by_numbers.setdefault((stem, tuple(numbers)), []).append(inner)
    for (stem, numbers_), inners in by_numbers.items():
        alternatives = "|".join(re.escape(inner) for inner in inners)
        plain.append(f"{re.escape(stem)}\\.(?:{'|'.join(numbers_)})\\.(?:{alternatives})")
    return f"(?:{'|'.join(plain)})$"
