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

EXPERTS = ".experts"
"""How the name of a layer's experts ends."""

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.[^.]+")
_ANY_EXPERT = r"(?:\.\d+\.[^.]+)?"
"""What may follow it."""


def expert_layer(name: str) -> str | None:
    """``model.layers.3.mlp.experts`` for the name of one expert's linear, else None."""
    found = _EXPERT.fullmatch(name)
    return None if found is None else found[1]


def with_whole_experts(members: Sequence[str], others: Iterable[str]) -> list[str]:
    """``members`` with the layer's name, once, for the linears of experts none of which is among ``others``.

    Loaders that know a layer's experts as one module look that name up.
    """
    parted = {expert_layer(name) for name in others}
    layers = {name: expert_layer(name) for name in members}
    return list(
        dict.fromkeys(name if layer is None or layer in parted else layer for name, layer in layers.items())
    )


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

    Members that stand in several blocks are written once with the block numbers as an alternation. The
    experts of a layer are one such set: their pattern matches any number of them.
    """
    others = set(others) - set(members)
    names = with_whole_experts(members, others)
    layers = {name for name in names if name.endswith(EXPERTS)}
    for fused, parts in FUSED:
        for name in list(names):
            stem, _, last = name.rpartition(".")
            if last == parts[0] and not any(f"{stem}.{part}" in others for part in parts):
                names.append(f"{stem}.{fused}")
    blocks: dict[tuple[str, str], list[str]] = {}
    plain: list[str] = []
    for name in names:
        found = re.fullmatch(r"(.*?)\.(\d+)\.(.*)", name)
        tail = _ANY_EXPERT if name in layers else ""
        if found is None:
            plain.append(re.escape(name) + tail)
        else:
            blocks.setdefault((found[1], re.escape(found[3]) + tail), []).append(found[2])
    by_numbers: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (stem, inner), numbers in blocks.items():
        by_numbers.setdefault((stem, tuple(numbers)), []).append(inner)
    for (stem, numbers_), inners in by_numbers.items():
        alternatives = "|".join(inners)
        plain.append(f"{re.escape(stem)}\\.(?:{'|'.join(numbers_)})\\.(?:{alternatives})")
    return f"(?:{'|'.join(plain)})$"
