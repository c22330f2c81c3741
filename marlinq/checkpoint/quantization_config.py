"""What a checkpoint's ``quantization_config`` says, read into one value whatever the dialect.

Sources: config keys of AutoGPTQ / GPTQModel, AutoAWQ and compressed-tensors (docs/formats.md).
Writing them is :mod:`marlinq.checkpoint.emit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import regex

from marlinq.checkpoint.reader import QUANTIZE_CONFIGS, read_json
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.formats.layouts.gptq import WORD_ADD_WRITER

_MAX_PATTERN = 10_000
# A hostile pattern can backtrack for longer than anybody lives; an honest one takes microseconds.
_MATCH_SECONDS = 2.0


@dataclass(frozen=True)
class ModuleSettings:
    """How a config says one module is quantised; ``symmetric`` is None where the config does not say."""

    bits: int
    group_size: int
    symmetric: bool | None
    desc_act: bool = False


@dataclass(frozen=True)
class Rule:
    """Settings for the modules whose name begins with a match of ``pattern``; None means not quantised."""

    pattern: regex.Pattern[str]
    settings: ModuleSettings | None
    where: str = "quantization_config"

    def matches(self, module: str) -> bool:
        """Whether the rule is about ``module``.

        Raises:
            CheckpointError: the pattern takes too long.
        """
        try:
            return self.pattern.match(module, timeout=_MATCH_SECONDS) is not None
        except TimeoutError:
            raise CheckpointError(
                f"{self.where}: the module pattern {self.pattern.pattern[:80]!r} takes more than "
                f"{_MATCH_SECONDS:.0f} s to match {module!r}; replace it by a simpler one"
            ) from None


@dataclass(frozen=True)
class QuantizationConfig:
    """A parsed quantization_config.

    Attributes:
        format: the name of the layout in :data:`marlinq.formats.FORMATS`.
        default: settings of modules that no rule names; None when only the rules quantise.
        rules: ordered, the first match wins.
        zero_writer: who packed GPTQ v1 zeros, where the config tells
            (see :mod:`marlinq.formats.layouts.gptq`).
        raw: the dict as found.
    """

    format: str
    default: ModuleSettings | None
    rules: tuple[Rule, ...] = ()
    zero_writer: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, module: str) -> ModuleSettings | None:
        """The settings of ``module``, or None when the config leaves it unquantised."""
        for rule in self.rules:
            if rule.matches(module):
                return rule.settings
        return self.default


def read_quantization_config(folder: Path, config: Mapping[str, Any]) -> QuantizationConfig | None:
    """The folder's quantization_config, or None for an unquantised checkpoint.

    ``config.json`` comes first, then ``quantize_config.json`` and ``quant_config.json``, as vLLM and
    SGLang do.

    Raises:
        UnsupportedError: a quant_method, version, width or scheme that marlinq does not handle, by name.
        CheckpointError: a key is missing or of the wrong type.
    """
    raw = config.get("quantization_config", config.get("compression_config"))
    text_config = config.get("text_config")
    if raw is None and isinstance(text_config, dict):
        raw = text_config.get("quantization_config")
    where = f"{folder / 'config.json'}: quantization_config"
    if raw is None:
        for name in QUANTIZE_CONFIGS:
            if (folder / name).exists():
                raw, where = read_json(folder, name), str(folder / name)
                break
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: expected an object, found {type(raw).__name__}")
    method = raw.get("quant_method")
    if method is None:
        method = "awq" if "w_bit" in raw or "zero_point" in raw else "gptq"
    readers = {"gptq": _gptq, "marlin": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}
    if not isinstance(method, str) or method not in readers:
        raise UnsupportedError(
            f"{where}: quant_method {method!r} is not supported; marlinq reads {', '.join(sorted(readers))}"
        )
    return replace(readers[method](_Keys(raw, where)), raw=raw)


class _Keys:
    """Typed access to one config object, with errors that name the file and key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def first(self, *names: str) -> Any:
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def integer(self, *names: str) -> int:
        value = self.first(*names)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {names[0]}: expected an integer, found {value!r}")
        return value

    def boolean(self, name: str, default: bool | None = None) -> bool | None:
        value = self.raw.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name}: expected true or false, found {value!r}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name}: expected an object, found {type(value).__name__}")
        return value

    def names(self, name: str) -> list[str]:
        value = self.raw.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{self.where}: {name}: expected a list of module names, found {value!r}")
        return value

    def pattern(self, text: str) -> regex.Pattern[str]:
        if len(text) > _MAX_PATTERN:
            raise CheckpointError(f"{self.where}: a module pattern of {len(text)} characters is too long")
        try:
            return regex.compile(text)
        except (regex.error, RecursionError) as error:
            raise CheckpointError(f"{self.where}: {text!r} is not a regular expression ({error})") from None

    def check(self, settings: ModuleSettings) -> ModuleSettings:
        if settings.bits not in (4, 8):
            raise UnsupportedError(
                f"{self.where}: {settings.bits} bits are not supported; marlinq handles 4 and 8"
            )
        if settings.group_size != -1 and not 1 <= settings.group_size < 1 << 24:
            raise CheckpointError(
                f"{self.where}: group_size: expected -1 or positive, found {settings.group_size}"
            )
        return settings


def _gptq(keys: _Keys) -> QuantizationConfig:
    raw = keys.raw
    layout = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    if raw.get("is_marlin_format") or raw.get("quant_method") == "marlin":
        layout = "marlin"
    names = {"gptq": "gptq", "gptq_v2": "gptq-v2", "marlin": "marlin"}
    if not isinstance(layout, str) or layout not in names:
        raise UnsupportedError(
            f"{keys.where}: checkpoint_format {layout!r} is not supported; marlinq reads {', '.join(names)}"
        )
    default = keys.check(
        ModuleSettings(
            bits=keys.integer("bits", "w_bit", "wbits"),
            group_size=keys.integer("group_size"),
            symmetric=keys.boolean("sym"),
            desc_act=bool(keys.boolean("desc_act", False)),
        )
    )
    rules = []
    for text, overrides in keys.mapping("dynamic").items():
        skip = text.startswith("-:")
        pattern = keys.pattern(text[2:] if text[:2] in ("-:", "+:") else text)
        settings = None if skip else _override(keys, text, overrides, default)
        rules.append(Rule(pattern, settings, keys.where))
    return QuantizationConfig(names[layout], default, tuple(rules), zero_writer=_zero_writer(keys))


def _override(keys: _Keys, text: str, overrides: object, default: ModuleSettings) -> ModuleSettings:
    if not isinstance(overrides, dict):
        raise CheckpointError(f"{keys.where}: dynamic rule {text!r}: expected an object, found {overrides!r}")
    inner = _Keys(overrides, f"{keys.where}: dynamic rule {text!r}")
    return inner.check(
        ModuleSettings(
            bits=inner.integer("bits") if "bits" in overrides else default.bits,
            group_size=inner.integer("group_size") if "group_size" in overrides else default.group_size,
            symmetric=inner.boolean("sym", default.symmetric),
            desc_act=bool(inner.boolean("desc_act", default.desc_act)),
        )
    )


def _zero_writer(keys: _Keys) -> str | None:
    quantizer = keys.mapping("meta").get("quantizer")
    entries = quantizer if isinstance(quantizer, list) else [quantizer]
    named = any(isinstance(entry, str) and entry.startswith("gptqmodel") for entry in entries)
    return WORD_ADD_WRITER if named else None


def _awq(keys: _Keys) -> QuantizationConfig:
    version = str(keys.raw.get("version") or keys.raw.get("format") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedError(f"{keys.where}: AWQ version {version!r} is not supported; marlinq reads gemm")
    bits = keys.integer("bits", "w_bit")
    if bits != 4:
        raise UnsupportedError(f"{keys.where}: AWQ with {bits} bits is not supported; the layout is 4-bit")
    group_size = keys.integer("group_size", "q_group_size")
    settings = keys.check(ModuleSettings(bits=4, group_size=group_size, symmetric=None))
    skipped = keys.names("modules_to_not_convert")
    rules = tuple(Rule(regex.compile(f".*{regex.escape(name)}"), None) for name in skipped)
    return QuantizationConfig("awq", settings, rules)


def _compressed_tensors(keys: _Keys) -> QuantizationConfig:
    for name in ("sparsity_config", "transform_config"):
        if keys.mapping(name):
            raise UnsupportedError(f"{keys.where}: a non-empty {name} is not supported")
    if keys.raw.get("kv_cache_scheme") is not None:
        raise UnsupportedError(f"{keys.where}: a quantised KV cache (kv_cache_scheme) is not supported")
    rules = [Rule(_target(keys, name), None, keys.where) for name in keys.names("ignore")]
    default: ModuleSettings | None = None
    groups = keys.mapping("config_groups")
    if not groups:
        raise CheckpointError(f"{keys.where}: config_groups: expected at least one group, found none")
    # Names bind before classes, as the loaders match.
    for label, group in groups.items():
        if not isinstance(group, dict):
            raise CheckpointError(f"{keys.where}: config_groups.{label}: expected an object, found {group!r}")
        inner = _Keys(group, f"{keys.where}: config_groups.{label}")
        settings = _weights(inner, keys.raw.get("format"))
        for target in inner.names("targets"):
            if target in ("Linear", "Conv1D"):
                default = settings
            else:
                rules.append(Rule(_target(inner, target), settings, inner.where))
    return QuantizationConfig("compressed-tensors", default, tuple(rules))


def _weights(keys: _Keys, outer_format: object) -> ModuleSettings:
    layout = keys.raw.get("format") or outer_format
    if layout != "pack-quantized":
        raise UnsupportedError(
            f"{keys.where}: format {layout!r} is not supported; marlinq reads pack-quantized"
        )
    if keys.raw.get("input_activations") or keys.raw.get("output_activations"):
        raise UnsupportedError(f"{keys.where}: quantised activations are not supported; weights only")
    weights = _Keys(keys.mapping("weights"), f"{keys.where}.weights")
    kind, strategy = weights.raw.get("type", "int"), weights.raw.get("strategy")
    if kind != "int" or strategy not in (None, "group", "channel"):
        raise UnsupportedError(
            f"{weights.where}: type {kind!r} with strategy {strategy!r} is not supported; "
            "marlinq reads int with group or channel"
        )
    group_size = weights.first("group_size")
    channelwise = strategy == "channel" or group_size is None
    return weights.check(
        ModuleSettings(
            bits=weights.integer("num_bits"),
            group_size=-1 if channelwise else weights.integer("group_size"),
            symmetric=weights.boolean("symmetric", True),
            desc_act=weights.raw.get("actorder") in ("group", "dynamic"),
        )
    )


def _target(keys: _Keys, text: str) -> regex.Pattern[str]:
    if text.startswith("re:"):
        return keys.pattern(text[3:])
    return regex.compile(regex.escape(text) + r"\Z")
