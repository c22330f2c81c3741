"""The config of compressed-tensors ``pack-quantized`` checkpoints (docs/formats.md).

Groups of targets, each with a scheme of its own; targets are exact names, class names, or ``re:`` patterns
matched with ``re.match``. Names bind before classes, as the loaders match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep, Matcher, Rule, Rules
from marlinq.core.scheme import Scheme
from marlinq.formats.dialects.base import Dialect, QuantizationConfig, declared_schemes, majority
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.dialects.patterns import EXPERTS, is_head, names_pattern
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec

_CLASSES = ("Linear", "Conv1D")


class CompressedTensorsDialect(Dialect):
    """``quant_method: compressed-tensors``."""

    name = "compressed-tensors"
    quant_methods = ("compressed-tensors",)

    def read(self, keys: Keys) -> QuantizationConfig:
        for name in ("sparsity_config", "transform_config"):
            if keys.mapping(name):
                raise UnsupportedError(f"{keys.where}: a non-empty {name} is not supported")
        if keys.raw.get("kv_cache_scheme") is not None:
            raise UnsupportedError(f"{keys.where}: a quantised KV cache (kv_cache_scheme) is not supported")
        rules: list[Rule[Scheme]] = [
            Rule(_target(keys, name), Keep(f"ignore: {name}")) for name in keys.names("ignore")
        ]
        default: Scheme | Keep = Keep("no config group targets its class")
        groups = keys.mapping("config_groups")
        if not groups:
            raise CheckpointError(f"{keys.where}: config_groups: expected at least one group, found none")
        for label, group in groups.items():
            if not isinstance(group, dict):
                raise CheckpointError(
                    f"{keys.where}: config_groups.{label}: expected an object, found {group!r}"
                )
            inner = Keys(group, f"{keys.where}: config_groups.{label}")
            scheme = _scheme(inner, keys.raw.get("format"))
            for target in inner.names("targets"):
                if target in _CLASSES:
                    default = scheme
                else:
                    rules.append(Rule(_target(inner, target), scheme))
        return QuantizationConfig("compressed-tensors", Rules(default, tuple(rules)))

    def says_head(self, config: QuantizationConfig, name: str) -> bool:
        # Class targets don't reach it: servers have a class of their own for heads.
        outcome = next((r.outcome for r in config.rules.ordered if r.matcher.matches(name)), None)
        return isinstance(outcome, Scheme)

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        schemes = declared_schemes(form, modules)
        default = majority(schemes)
        groups: dict[str, Any] = {}
        ordered = sorted(dict.fromkeys(schemes.values()), key=lambda scheme: scheme == default)
        for index, scheme in enumerate(ordered):
            members = [name for name, found in schemes.items() if found == scheme]
            # A class target does not reach lm_head in every loader, so it is always named.
            named = [name for name in members if is_head(name)] if scheme == default else members
            targets = ["re:" + names_pattern(named, schemes)] if named else []
            groups[f"group_{index}"] = {
                "targets": [*targets, "Linear"] if scheme == default else targets,
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": scheme.element.bits,
                    "type": "int",
                    "symmetric": not scheme.stores_zeros,
                    "strategy": scheme.granularity.kind,
                    "group_size": scheme.granularity.channels or None,
                    "dynamic": False,
                    "actorder": None,
                },
            }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": [_ignored(name) for name in unquantized],
            "config_groups": groups,
            "kv_cache_scheme": None,
        }


def _ignored(name: str) -> str:
    """Loaders look experts up one by one, also those that are stored as one tensor."""
    return "re:" + names_pattern([name], ()) if name.endswith(EXPERTS) else name


def _scheme(keys: Keys, outer_format: object) -> Scheme:
    layout = keys.raw.get("format") or outer_format
    if layout != "pack-quantized":
        raise UnsupportedError(
            f"{keys.where}: format {layout!r} is not supported; marlinq reads pack-quantized"
        )
    if keys.raw.get("input_activations") or keys.raw.get("output_activations"):
        raise UnsupportedError(f"{keys.where}: quantised activations are not supported; weights only")
    weights = Keys(keys.mapping("weights"), f"{keys.where}.weights")
    kind, strategy = weights.raw.get("type", "int"), weights.raw.get("strategy")
    if kind != "int" or strategy not in (None, "group", "channel"):
        raise UnsupportedError(
            f"{weights.where}: type {kind!r} with strategy {strategy!r} is not supported; "
            "marlinq reads int with group or channel"
        )
    channelwise = strategy == "channel" or weights.first("group_size") is None
    return Scheme(
        element=weights.element("num_bits"),
        granularity=Granularity.channel() if channelwise else weights.granularity("group_size"),
        zero_point="midpoint" if weights.boolean("symmetric", True) else "stored",
        act_order=weights.raw.get("actorder") in ("group", "dynamic"),
    )


def _target(keys: Keys, text: str) -> Matcher:
    return keys.pattern(text[3:]) if text.startswith("re:") else keys.exact(text)
