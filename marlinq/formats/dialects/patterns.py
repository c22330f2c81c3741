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

_LANGUAGE_MODELS = ("model.language_model", "language_model.model", "thinker.model", "model")
"""Names in front of ``.layers`` of a language model inside another: transformers', vLLM's, those of
Qwen-Omni's files, and of older files and SGLang. Loaders rename weights, but take patterns as they are
(docs/formats.md)."""
_HEADS = ("lm_head", "language_model.lm_head", "thinker.lm_head")

_DRAFT, WHOLE_DRAFT = "mtp.", "^mtp.*"
"""How names of a draft head begin, and the pattern of all of them that loaders look for."""
_NUMBERED = re.compile(r"(.*?)\.(\d+)\.")
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


def in_wrapper(names: Iterable[str]) -> bool:
    """Whether ``names``, of all linears of a checkpoint, are those of a language model inside another."""
    blocks = [name for name in names if in_block(name) and not name.startswith("mtp.")]
    inside = any(name.startswith(tuple(f"{each}." for each in _LANGUAGE_MODELS[:-1])) for name in blocks)
    # Older files have the language model's blocks as ``model.layers``, beside those of a tower.
    beside = any(not name.startswith("model.") for name in blocks)
    return inside or (beside and any(name.startswith("model.layers.") for name in blocks))


def whole_drafts(names: Sequence[str], others: Iterable[str]) -> tuple[list[str], list[str]]:
    """Patterns of draft heads (multi-token prediction) without a linear among ``others``, and other names.

    Loaders of a draft head ask for layers that they fuse in ways of their own, so that a list of single
    linears misses some: SGLang then builds them quantised, drops what is stored, and accepts no draft. A
    pattern of the whole head, ``^mtp.*`` or the block behind the model's last, leaves nothing out.
    """
    others = set(others)
    lists: dict[str, set[int]] = {}
    for name in others:
        if (found := _NUMBERED.match(name)) is not None:
            lists.setdefault(found[1], set()).add(int(found[2]))
    patterns: dict[str, None] = {}
    rest = []
    for name in names:
        found = _NUMBERED.match(name)
        if name.startswith(_DRAFT) and not any(other.startswith(_DRAFT) for other in others):
            patterns[WHOLE_DRAFT] = None
        elif found is not None and found[1] in lists and int(found[2]) > max(lists[found[1]]):
            patterns[f"{_stem_pattern(found[1], wrapped=True)}\\.{found[2]}\\..*"] = None
            rest.append(name)
        else:
            rest.append(name)
    return list(patterns), rest


def both_spellings(names: Iterable[str], *, wrapped: bool) -> list[str]:
    """``names``, and of a ``wrapped`` language model's what other loaders call them."""
    found: dict[str, None] = {}
    for name in names:
        found[name] = None
        if wrapped and is_head(name):
            found |= dict.fromkeys(_HEADS)
        elif wrapped and (inner := _inside_language_model(name)) is not None:
            found |= dict.fromkeys(f"{each}.{inner}" for each in _LANGUAGE_MODELS)
    return list(found)


def without_prefix(name: str) -> str:
    """The part of a wrapped language model's name that all loaders share, for lists of parts of names."""
    inner = _inside_language_model(name)
    return name if inner is None else inner


def _inside_language_model(name: str) -> str | None:
    """``layers.3.mlp.up_proj`` for a name in a language model's blocks, else None."""
    return next(
        (name[len(each) + 1 :] for each in _LANGUAGE_MODELS if name.startswith(f"{each}.layers.")), None
    )


def _stem_pattern(stem: str, wrapped: bool) -> str:
    """A pattern of what stands in front of the number of a block."""
    if wrapped and (inner := _inside_language_model(f"{stem}.")) is not None:
        prefixes = "|".join(map(re.escape, _LANGUAGE_MODELS))
        return f"(?:{prefixes})\\.{re.escape(inner.removesuffix('.'))}"
    return re.escape(stem)


def names_pattern(members: Sequence[str], others: Iterable[str], *, wrapped: bool = False) -> str:
    """One regular expression that matches exactly ``members``, and the fused name of a complete set of parts.

    Members that stand in several blocks are written once with the block numbers as an alternation. The
    experts of a layer are one such set: their pattern matches any number of them. Names of a ``wrapped``
    language model are matched as every loader spells them.
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
            spellings = _HEADS if wrapped and is_head(name) else (name,)
            plain += [re.escape(each) + tail for each in spellings]
        else:
            blocks.setdefault((found[1], re.escape(found[3]) + tail), []).append(found[2])
    by_numbers: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (stem, inner), numbers in blocks.items():
        by_numbers.setdefault((stem, tuple(numbers)), []).append(inner)
    for (stem, numbers_), inners in by_numbers.items():
        alternatives = "|".join(inners)
        plain.append(f"{_stem_pattern(stem, wrapped)}\\.(?:{'|'.join(numbers_)})\\.(?:{alternatives})")
    return f"(?:{'|'.join(plain)})$"
