"""Find ``quantization_config`` in a checkpoint folder; :mod:`marlinq.formats.dialects` parses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from marlinq.checkpoint.reader import QUANTIZE_CONFIGS, read_json
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
        CheckpointError: a key is missing or of the wrong type.
    """
    raw, where = _found(folder, config)
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: expected an object, found {type(raw).__name__}")
    if _EXPERT_DTYPE in config and raw.get("quant_method") == "fp8":
        raw = {_EXPERT_DTYPE: config[_EXPERT_DTYPE], **raw}
    return replace(dialect_of(raw, where).read(Keys(raw, where)), raw=raw)


def config_place(folder: Path, config: Mapping[str, Any]) -> str:
    """Where :func:`read_quantization_config` finds the config, for messages."""
    return _found(folder, config)[1]


def _found(folder: Path, config: Mapping[str, Any]) -> tuple[Any, str]:
    # An empty object counts as absent.
    raw = config.get("quantization_config", config.get("compression_config")) or None
    text_config = config.get("text_config")
    if raw is None and isinstance(text_config, dict):
        raw = text_config.get("quantization_config") or None
    where = f"{folder / 'config.json'}: quantization_config"
    if raw is None:
        for name in QUANTIZE_CONFIGS:
            if (folder / name).exists():
                raw, where = read_separate_config(folder, name), str(folder / name)
                break
    return raw, where


def read_separate_config(folder: Path, name: str) -> dict[str, Any]:
    """The config object of a file beside config.json; in ModelOpt's file it is below a key.

    Raises:
        CheckpointError: as :func:`marlinq.checkpoint.reader.read_json`.
    """
    raw = read_json(folder, name)
    inner = raw.get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else raw


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
