"""The config of ModelOpt (docs/formats.md).

``quant_algo`` names one scheme for all modules, or ``MIXED_PRECISION`` with one for each of
``quantized_layers``. Modules are excluded by patterns with ``*``. ``hf_quant_config.json`` holds the same
settings under ``quantization``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.core.errors import CheckpointError, ConversionRefused, UnsupportedError
from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep, Rule, Rules
from marlinq.core.scheme import Activations, Scheme
from marlinq.formats.dialects.dialect import Dialect, QuantizationConfig, declared_schemes
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.dialects.name_patterns import (
    WHOLE_DRAFT,
    both_spellings,
    in_wrapper,
    whole_drafts,
    with_whole_experts,
)
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec

_MIXED = "MIXED_PRECISION"
_NV_GROUP = Granularity.group(16)


def _nvfp4(activations: Activations | None) -> Scheme:
    return Scheme(
        E2M1, _NV_GROUP, "none", "float8_e4m3fn", tensor_scale="multiplies", activations=activations
    )


_ALGORITHMS = {
    "NVFP4": _nvfp4(Activations(E2M1, _NV_GROUP, dynamic=False)),
    "W4A16_NVFP4": _nvfp4(None),
    "FP8": Scheme(
        E4M3, Granularity.tensor(), "none", activations=Activations(E4M3, Granularity.tensor(), dynamic=False)
    ),
}
"""Schemes by the name of their algorithm."""


class ModelOptDialect(Dialect):
    """``quant_method: modelopt``."""

    name = "modelopt"
    quant_methods = ("modelopt", "modelopt_fp4", "modelopt_mixed")
    marks = ("quant_algo",)
    settings = ("quant_algo", "ignore")

    def read(self, keys: Keys) -> QuantizationConfig:
        rules: list[Rule[Scheme]] = [
            Rule(keys.glob(name), Keep(f"ignore: {name}"))
            for name in dict.fromkeys((*keys.names("ignore"), *keys.names("exclude_modules")))
        ]
        algorithm = keys.raw.get("quant_algo")
        if algorithm != _MIXED:
            return QuantizationConfig("modelopt", Rules(_scheme(keys, algorithm), tuple(rules)))
        for name, settings in keys.mapping("quantized_layers").items():
            if not isinstance(settings, dict):
                raise CheckpointError(
                    f"{keys.where}: quantized_layers.{name}: expected an object, found {settings!r}"
                )
            inner = Keys(settings, f"{keys.where}: quantized_layers.{name}")
            rules.append(Rule(keys.exact(name), _scheme(inner, settings.get("quant_algo"))))
        return QuantizationConfig("modelopt", Rules(Keep("not in quantized_layers"), tuple(rules)))

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        schemes = declared_schemes(form, modules)
        names = {scheme: _algorithm(form, scheme) for scheme in dict.fromkeys(schemes.values())}
        drafts, others = whole_drafts(unquantized, schemes)
        config: dict[str, Any] = {
            "quant_method": "modelopt",
            "ignore": [
                *(["mtp*"] if WHOLE_DRAFT in drafts else []),
                *both_spellings(
                    with_whole_experts(others, schemes), wrapped=in_wrapper([*schemes, *unquantized])
                ),
            ],
            "producer": {"name": "modelopt"},
            "kv_cache_quant_algo": None,
        }
        if len(names) == 1:
            ((scheme, algorithm),) = names.items()
            return {**config, "quant_algo": algorithm, **_group_size(scheme)}
        layers = {
            name: {"quant_algo": names[scheme], **_group_size(scheme)} for name, scheme in schemes.items()
        }
        return {**config, "quant_algo": _MIXED, "quantized_layers": layers}

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        inner = {
            key: value for key, value in config.items() if key not in ("quant_method", "producer", "ignore")
        }
        quantization = {**inner, "exclude_modules": config["ignore"]}
        return {"hf_quant_config.json": {"producer": config["producer"], "quantization": quantization}}


def _group_size(scheme: Scheme) -> dict[str, int]:
    return {"group_size": scheme.granularity.channels} if scheme.granularity.kind == "group" else {}


def _algorithm(form: Format, scheme: Scheme) -> str:
    algorithm = next((name for name, other in _ALGORITHMS.items() if other == scheme), None)
    if algorithm is None:
        raise ConversionRefused(f"{form.name}: {scheme.describe()}; it has no name for that")
    return algorithm


def _scheme(keys: Keys, algorithm: object) -> Scheme:
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise UnsupportedError(
            f"{keys.where}: quant_algo {algorithm!r} is not supported; marlinq reads {', '.join(_ALGORITHMS)}"
        )
    scheme = _ALGORITHMS[algorithm]
    size = keys.raw.get("group_size")
    if scheme.granularity.kind == "group" and size not in (None, scheme.granularity.channels):
        raise UnsupportedError(f"{keys.where}: {algorithm} in groups of {size!r} is not supported")
    return scheme
