"""Find ``quantization_config`` in a checkpoint folder; :mod:`marlinq.formats.dialects` parses it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from marlinq.checkpoint.reader import CONFIG, QUANTIZE_CONFIGS, read_json
from marlinq.core.errors import CheckpointError
from marlinq.formats.dialects import Keys, QuantizationConfig, dialect_of

_CONFIG_KEYS = ("quantization_config", "compression_config")
_EXPERT_DTYPE = "expert_dtype"
"""A word on the quantisation of experts that DeepSeek-V4 has beside the others."""


def read_quantization_config(folder: Path, config: Mapping[str, Any]) -> QuantizationConfig | None:
    """The folder's quantization_config, or None for an unquantised checkpoint.

    ``config.json`` comes first, then ``quantize_config.json`` and ``quant_config.json``, as vLLM and
    SGLang do.

    Raises:
        UnsupportedError: a quant_method, version, width or scheme that marlinq does not handle.
        CheckpointError: it is no object, or a key is missing or of the wrong type.
    """
    raw, where = _found(folder, config)
    if raw and _EXPERT_DTYPE in config and raw.get("quant_method") == "fp8":
        raw = {_EXPERT_DTYPE: config[_EXPERT_DTYPE], **raw}
    return parse_quantization_config(raw, where)


def parse_quantization_config(raw: Any, where: str) -> QuantizationConfig | None:
    """A config as JSON holds it; None if it says nothing. ``where`` names it in messages.

    Raises:
        UnsupportedError, CheckpointError: as :func:`read_quantization_config`.
    """
    raw = said_config(raw, where)
    return None if raw is None else replace(dialect_of(raw, where).read(Keys(raw, where)), raw=raw)


def said_config(raw: Any, where: str) -> dict[str, Any] | None:
    """``raw`` if it is a config; None for null and an empty object, which exports of unquantised models have.

    Raises:
        CheckpointError: anything else, which may be what is left of a config.
    """
    if raw is None or raw == {}:
        return None
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{where}: expected an object, found {reprlib.repr(raw)}; remove it if the model is not "
            "quantised, else restore it from the original"
        )
    return raw


def config_place(folder: Path, config: Mapping[str, Any]) -> str:
    """Where :func:`read_quantization_config` finds the config, for messages."""
    return _found(folder, config)[1]


def config_in(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any] | None, str]:
    """The config in the content of ``config.json``, and its place. ``where`` names the file.

    Raises:
        CheckpointError: as :func:`said_config`.
    """
    text_config = config.get("text_config")
    places = [(config, key, key) for key in _CONFIG_KEYS]
    if isinstance(text_config, dict):
        places += [(text_config, key, f"text_config.{key}") for key in _CONFIG_KEYS]
    for level, key, path in places:
        raw = said_config(level.get(key), f"{where}: {path}")
        if raw is not None:
            return raw, f"{where}: {path}"
    return None, f"{where}: {_CONFIG_KEYS[0]}"


def _found(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    raw, where = config_in(config, str(folder / CONFIG))
    if raw is None:
        for name in QUANTIZE_CONFIGS:
            if (folder / name).exists():
                raw = read_separate_config(folder, name)
                if raw is not None:
                    return raw, str(folder / name)
    return raw, where


def read_separate_config(folder: Path, name: str) -> dict[str, Any] | None:
    """The config of a file beside config.json, below a key in ModelOpt's file; None if it says nothing.

    Raises:
        CheckpointError: as :func:`marlinq.checkpoint.reader.read_json`, or as :func:`said_config`.
    """
    place, raw = str(folder / name), read_json(folder, name)
    if "quantization" not in raw:
        return said_config(raw, place)
    inner = said_config(raw["quantization"], f"{place}: quantization")
    return None if inner is None else {"quant_method": "modelopt", **inner}


def without_quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` without its quantization_config, at every level that may hold one."""
    result = {key: value for key, value in config.items() if key not in (*_CONFIG_KEYS, _EXPERT_DTYPE)}
    text_config = result.get("text_config")
    if isinstance(text_config, dict):
        result["text_config"] = {key: value for key, value in text_config.items() if key not in _CONFIG_KEYS}
    return result


def replace_quantization_config(config: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` with ``new`` as its only quantization_config; old ones at all levels are removed."""
    return {**without_quantization_config(config), "quantization_config": dict(new)}
