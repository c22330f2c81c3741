"""Checks that a checkpoint's config and tokenizer are its original's.

Tensors alone don't make a model: with another activation, another base of the rotary embedding or other
numbers of the tokens the same weights compute something else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from marlinq.calibration.tokens import moved_tokens, same_tokenizer_files
from marlinq.checkpoint import Checkpoint, without_quantization_config
from marlinq.core import boundaries
from marlinq.core.errors import MarlinqError
from marlinq.models import parse_config
from marlinq.operations.verify.verification_report import Check, Findings
from marlinq.runtime.loading import read_tokenizer

_IRRELEVANT = re.compile(
    r"architectures|auto_map|.*dtype|transformers_version|_.*|.*dropout.*|.*initializer.*|init_std|"
    r"use_cache|output_.*|return_dict.*|id2label|label2id|num_labels|problem_type|pretraining_tp|"
    r"tie_word_embeddings|tokenizer_class|name_or_path|torchscript|use_bfloat16|.*loss.*|chunk_size_.*|"
    r".*layerdrop|.*jitter_noise|use_mamba_kernels|quantization_config"
)
"""Settings that don't change what a model computes, or that other checks judge (types, ties)."""
_SLIGHT = re.compile(r"max_position_embeddings|(bos|eos|pad|sep)_token_id|num_nextn_predict_layers|.*mtp.*")
"""Settings of where text begins and ends, which some makers correct, and of draft heads, which some drop."""
_DERIVED = {
    "max_window_layers": ("layer_types", "sliding_attention"),
    "attention_chunk_size": ("layer_types", "chunked_attention"),
    "no_rope_layer_interval": ("no_rope_layers", None),
    "interleave_moe_layer_step": ("moe_layers", None),
}
"""Settings -> the list of layers through which alone they change the model, and its entry that they are for.
transformers completes the lists, which are compared too."""
_OLD_ROPE_TYPES = {"mrope": "default", "su": "longrope"}
"""Today's names of kinds of rotary embeddings, by older names, which transformers replaces when it saves."""
_PROBE = "The quick brown fox, 12345.67 na\u00efve \u4f60\u597d\n\tfor (i = 0; i < n; ++i) { }  <b>x</b>"
_SHOWN = 60


def check_settings(checkpoint: Checkpoint, original: Checkpoint, trust_remote_code: bool) -> Check:
    """Compares the settings in ``config.json``, and the tokenizer, with the original's."""
    findings = Findings("settings")
    _compare_configs(checkpoint, original, trust_remote_code, findings)
    _compare_tokenizers(checkpoint, original, trust_remote_code, findings)
    return findings.result("config.json and tokenizer are the original's, as far as they change the model")


def _compare_configs(
    checkpoint: Checkpoint, original: Checkpoint, trust_remote_code: bool, findings: Findings
) -> None:
    mine, theirs = (without_quantization_config(each.config) for each in (checkpoint, original))
    if mine == theirs:
        return
    ours, others = mine.get("architectures"), theirs.get("architectures")
    if ours and others and ours != others:
        findings.warnings.append(
            f"config.json: architectures is {_short(ours)}, the original's is {_short(others)}; servers "
            "choose the model's code by it"
        )
    known: PretrainedConfig | None = None
    try:
        parsed = [
            parse_config(
                raw, source=str(each.path), trust_remote_code=trust_remote_code, tensors=each.tensors
            )
            for raw, each in ((mine, checkpoint), (theirs, original))
        ]
        if parsed[0].model_type != parsed[1].model_type:
            # A text model that was taken out of its wrapper is compared with the model inside.
            parsed = [each.get_text_config() for each in parsed]
        mine, theirs = (each.to_dict() for each in parsed)
        known = parsed[0]
    except MarlinqError:
        # The row "loads" has the reason; without transformers' defaults only what both files say counts.
        pass
    for key, ours, others in _differences(mine, theirs, complete=known is not None):
        if known is not None and _without_effect(key, mine, theirs, known):
            continue
        text = f"config.json: {key} is {_short(ours)}, the original's is {_short(others)}"
        foreign = known is not None and not _knows(known, key)
        slight = foreign or _SLIGHT.fullmatch(key.rpartition(".")[2])
        (findings.warnings if slight else findings.failures).append(text)


def _without_effect(
    key: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], known: PretrainedConfig
) -> bool:
    """Whether the setting of the dotted ``key`` changes neither model, by :data:`_DERIVED`."""
    *levels, last = key.split(".")
    name, entry = _DERIVED.get(last, ("", None))
    if not name or not _knows(known, ".".join([*levels, name])):
        return False
    for level in levels:
        mine, theirs = mine[level], theirs[level]
    layers = _listed(mine.get(name))
    same = isinstance(layers, list) and layers == _listed(theirs.get(name))
    return same and entry not in layers


def _knows(config: PretrainedConfig, key: str) -> bool:
    """Whether the class of ``config``, or of the config in it that the dotted ``key`` leads to, has it."""
    first, _, rest = key.partition(".")
    inner = getattr(config, first, None)
    if rest and isinstance(inner, PretrainedConfig):
        return _knows(inner, rest)
    return first in _parameters(type(config))


def _parameters(config_class: type) -> set[str]:
    """Names of the settings that a class of configs knows; any other key of the file changes nothing."""
    own = {name for base in config_class.__mro__ for name in vars(base).get("__annotations__", ())}
    renamed = getattr(config_class, "attribute_map", {})
    return own | set(inspect.signature(config_class).parameters) | {"model_type", *renamed}


def _differences(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "", *, complete: bool
) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, the original's value) of what differs.

    A key that only one of two whole configs has is another version's, or a user's own; below them it counts,
    unless defaults are left out because the configs are not ``complete``.
    """
    if "rope" in prefix:
        mine, theirs = _with_rope_type(mine), _with_rope_type(theirs)
    both = "model_type" in mine or not complete
    keys = mine.keys() & theirs.keys() if both else mine.keys() | theirs.keys()
    for key in sorted(keys, key=str):
        if _IRRELEVANT.fullmatch(str(key)):
            continue
        ours, others = _listed(mine.get(key)), _listed(theirs.get(key))
        if isinstance(ours, Mapping) and isinstance(others, Mapping):
            yield from _differences(ours, others, f"{prefix}{key}.", complete=complete)
        elif ours != others:
            yield f"{prefix}{key}", ours, others


def _with_rope_type(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a rotary embedding, its kind under ``rope_type`` only; older files have ``type``, or
    both."""
    kind = rope.get("rope_type", rope.get("type"))
    if not isinstance(kind, str):
        return rope
    rest = {key: value for key, value in rope.items() if key != "type"}
    return {**rest, "rope_type": _OLD_ROPE_TYPES.get(kind, kind)}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _compare_tokenizers(
    checkpoint: Checkpoint, original: Checkpoint, trust_remote_code: bool, findings: Findings
) -> None:
    if same_tokenizer_files(checkpoint.path, original.path):
        return
    try:
        mine, theirs = (read_tokenizer(each, trust_remote_code) for each in (checkpoint, original))
    except MarlinqError:
        # The row "loads" has the reason, or the original has none that can be read.
        return
    if mine is None or theirs is None:
        if theirs is not None:
            findings.warnings.append("tokenizer: missing; the original has one")
        return
    try:
        if (moved := moved_tokens(mine, theirs)) is not None:
            findings.failures.append(f"tokenizer: {moved}")
        elif _probed(mine) != _probed(theirs):
            findings.warnings.append("tokenizer: splits text into other tokens than the original's")
    except MarlinqError as error:
        findings.warnings.append(f"tokenizer: can't be compared: {error}")


def _probed(tokenizer: Any) -> list[int]:
    with boundaries.tokenizer(tokenizer):
        ids: list[int] = tokenizer(_PROBE)["input_ids"]
    return ids
