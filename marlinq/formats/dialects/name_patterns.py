"""Write one pattern for many module names, as the loaders of a config match them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Loaders that fuse these linears match rules against the fused name, others against the parts
# (docs/formats.md).
FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("w13", ("w1", "w3")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("fused_wqa_wkv", ("wq_a", "wkv")),
    ("wkv_gate", ("wgate", "wkv")),
)
"""Fused linears of serving engines: the fused name and the names of its parts. Those of delta nets, latent
attention and DeepSeek-V4 were read in vLLM 0.33 and SGLang 0.5.23 (operations/inspect/servers.toml)."""

EXPERTS = ".experts"
"""End of the name of a layer's experts."""

_LANGUAGE_MODELS = ("model.language_model", "language_model.model", "thinker.model", "model")
"""Prefixes of ``.layers`` in a language model inside a wrapper: of transformers, of vLLM, of Qwen-Omni's
files, of older files and SGLang. Loaders rename weights, but not patterns in a config (docs/formats.md)."""
_HEADS = ("lm_head", "language_model.lm_head", "thinker.lm_head")

_DRAFT, WHOLE_DRAFT = "mtp.", "^mtp.*"
"""Prefix of the names of a draft head, and the pattern that loaders expect for all of them."""
_NUMBERED = re.compile(r"(.*?)\.(\d+)\.")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.[^.]+")
_ANY_EXPERT = r"(?:\.\d+\.[^.]+)?"
"""Pattern of what may follow the name of a layer's experts."""


def expert_layer(name: str) -> str | None:
    """``model.layers.3.mlp.experts`` for the name of one expert's linear, else None."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else match[1]


def with_whole_experts(members: Sequence[str], others: Iterable[str]) -> list[str]:
    """``members``, where the names of a layer's experts are replaced by the layer's name, if none is in
    ``others``.

    Loaders that have one module for a layer's experts look that name up.
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
    """Whether ``name`` is an output head's, ``lm_head`` or GPT-NeoX's ``embed_out``."""
    return name.rsplit(".", maxsplit=1)[-1] in ("lm_head", "embed_out")


def in_wrapper(names: Iterable[str]) -> bool:
    """Whether ``names``, of all linears of a checkpoint, belong to a language model inside a wrapper."""
    blocks = [name for name in names if in_block(name) and not name.startswith("mtp.")]
    inside = any(name.startswith(tuple(f"{each}." for each in _LANGUAGE_MODELS[:-1])) for name in blocks)
    # Older files call the language model's blocks ``model.layers``, beside the blocks of a vision or audio
    # tower.
    beside = any(not name.startswith("model.") for name in blocks)
    return inside or (beside and any(name.startswith("model.layers.") for name in blocks))


def whole_drafts(names: Sequence[str], others: Iterable[str]) -> tuple[list[str], list[str]]:
    """Patterns of draft heads (multi-token prediction) that have no linear in ``others``; and the other
    names.

    Each loader fuses the layers of a draft head in its own way, so a list of single linears would miss fused
    ones. SGLang then builds these quantised, drops the stored weights, and rejects every draft. A pattern of
    the whole head, ``^mtp.*`` or the block after the model's last, matches every fusion.
    """
    others = set(others)
    lists: dict[str, set[int]] = {}
    for name in others:
        if (match := _NUMBERED.match(name)) is not None:
            lists.setdefault(match[1], set()).add(int(match[2]))
    patterns: dict[str, None] = {}
    rest = []
    for name in names:
        match = _NUMBERED.match(name)
        if name.startswith(_DRAFT) and not any(other.startswith(_DRAFT) for other in others):
            patterns[WHOLE_DRAFT] = None
        elif match is not None and match[1] in lists and int(match[2]) > max(lists[match[1]]):
            patterns[f"{_stem_pattern(match[1], wrapped=True)}\\.{match[2]}\\..*"] = None
            rest.append(name)
        else:
            rest.append(name)
    return list(patterns), rest


def both_spellings(names: Iterable[str], *, wrapped: bool) -> list[str]:
    """``names``; of a ``wrapped`` language model also the names that other loaders give them."""
    spellings: dict[str, None] = {}
    for name in names:
        spellings[name] = None
        if wrapped and is_head(name):
            spellings |= dict.fromkeys(_HEADS)
        elif wrapped and (inner := _inside_language_model(name)) is not None:
            spellings |= dict.fromkeys(f"{each}.{inner}" for each in _LANGUAGE_MODELS)
    return list(spellings)


def without_prefix(name: str) -> str:
    """The part of a wrapped language model's module name that is the same in all loaders."""
    inner = _inside_language_model(name)
    return name if inner is None else inner


def _inside_language_model(name: str) -> str | None:
    """``layers.3.mlp.up_proj`` for a name in a language model's blocks, else None."""
    return next(
        (name[len(each) + 1 :] for each in _LANGUAGE_MODELS if name.startswith(f"{each}.layers.")), None
    )


def _stem_pattern(stem: str, wrapped: bool) -> str:
    """A pattern of ``stem``, the text before a block's number."""
    if wrapped and (inner := _inside_language_model(f"{stem}.")) is not None:
        prefixes = "|".join(map(re.escape, _LANGUAGE_MODELS))
        return f"(?:{prefixes})\\.{re.escape(inner.removesuffix('.'))}"
    return re.escape(stem)


def names_pattern(members: Sequence[str], others: Iterable[str], *, wrapped: bool = False) -> str:
    """One regular expression that matches exactly ``members``, and the fused name of a complete set of parts.

    Members that differ only in the block's number are written once, with the numbers as an alternation. A
    layer's experts are one such set, whose pattern matches any expert. Names of a ``wrapped`` language model
    are matched in every loader's spelling.
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
        match = re.fullmatch(r"(.*?)\.(\d+)\.(.*)", name)
        tail = _ANY_EXPERT if name in layers else ""
        if match is None:
            spellings = _HEADS if wrapped and is_head(name) else (name,)
            plain += [re.escape(each) + tail for each in spellings]
        else:
            blocks.setdefault((match[1], re.escape(match[3]) + tail), []).append(match[2])
    by_numbers: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (stem, inner), numbers in blocks.items():
        by_numbers.setdefault((stem, tuple(numbers)), []).append(inner)
    for (stem, numbers_), inners in by_numbers.items():
        alternatives = "|".join(inners)
        plain.append(f"{_stem_pattern(stem, wrapped)}\\.(?:{'|'.join(numbers_)})\\.(?:{alternatives})")
    return f"(?:{'|'.join(plain)})$"
