"""The config of AutoRound's own exports, whose tensors are those of GPTQ v1 or of AWQ (docs/formats.md).

``extra_config`` has other settings for single modules. Its keys are full names, ends of names, or regular
expressions that are searched in names. A module of 16 bits is unquantised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.core.errors import CheckpointError, ConversionRefused, UnsupportedError
from marlinq.core.rules import Keep, Rule, Rules
from marlinq.core.scheme import Scheme
from marlinq.formats.dialects.dialect import Dialect, QuantizationConfig
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec

_FORMATS = {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round:auto_awq": "awq"}
"""Formats by their ``packing_format``."""
_UNQUANTIZED_BITS = 16


class AutoRoundDialect(Dialect):
    """``quant_method: auto-round``; read, never written."""

    name = "auto-round"
    quant_methods = ("auto-round", "intel/auto-round")

    def read(self, keys: Keys) -> QuantizationConfig:
        packing = keys.raw.get("packing_format", "auto_round:auto_gptq")
        if not isinstance(packing, str) or packing not in _FORMATS:
            raise UnsupportedError(
                f"{keys.where}: packing_format {packing!r} is not supported; "
                f"marlinq reads {', '.join(_FORMATS)}"
            )
        default = _scheme(keys, keys)
        named: list[Rule[Scheme]] = []
        rules: list[Rule[Scheme]] = []
        for name, changes in keys.mapping("extra_config").items():
            if not isinstance(changes, dict):
                raise CheckpointError(
                    f"{keys.where}: extra_config.{name}: expected an object, found {changes!r}"
                )
            inner = Keys(changes, f"{keys.where}: extra_config.{name}")
            kept = changes.get("bits", keys.raw.get("bits")) == _UNQUANTIZED_BITS
            outcome = Keep(f"extra_config: {name} has 16 bits") if kept else _scheme(inner, keys)
            named += [Rule(keys.exact(name), outcome), Rule(keys.named(name), outcome)]
            rules.append(Rule(keys.search(name), outcome))
        return QuantizationConfig(_FORMATS[packing], Rules(default, (*named, *rules)))

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        raise ConversionRefused(
            f"{self.name}: its configs are read, never written; the formats have their own"
        )


def _scheme(changes: Keys, default: Keys) -> Scheme:
    """The scheme of a module: settings from ``changes``, and from the whole config where ``changes`` has
    none."""

    def of(key: str) -> Keys:
        return changes if changes.raw.get(key) is not None else default

    kind = of("data_type").raw.get("data_type", "int")
    if kind != "int":
        raise UnsupportedError(f"{changes.where}: data_type {kind!r} is not supported; marlinq reads int")
    return Scheme(
        element=of("bits").element("bits"),
        granularity=of("group_size").granularity("group_size"),
        zero_point="midpoint" if of("sym").boolean("sym", False) else "stored",
    )
