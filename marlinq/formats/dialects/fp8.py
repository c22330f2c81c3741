"""The config of Hugging Face's ``fp8`` checkpoints, also of DeepSeek's and GPTQModel's (docs/formats.md).

``weight_block_size`` is [rows, columns] of a block, or null for one scale per tensor. Modules are excluded by
name. Weights are codes times scales; only in GPTQModel's files, whose config has ``weight_scale_semantics:
inverse``, they are codes divided by scales. ``expert_dtype`` is in configs of DeepSeek-V4, whose scales are
powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marlinq.core.errors import CheckpointError, ConversionRefused, UnsupportedError
from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep, Rule, Rules
from marlinq.core.scheme import Activations, Scheme
from marlinq.core.schemes import MX_GROUP
from marlinq.formats.dialects.dialect import Dialect, QuantizationConfig, declared_schemes
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.dialects.name_patterns import (
    both_spellings,
    expert_layer,
    in_wrapper,
    with_whole_experts,
)
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec

_GPTQMODEL_GRANULARITIES = {
    "tensor": Granularity.tensor(),
    "row": Granularity.channel(),
}
_EXPERTS = r"\.experts\.\d+\."
_FP4 = Scheme(E2M1, MX_GROUP, E2M1.zero_point, "float8_e8m0fnu")
"""Scheme of the experts where the config has ``expert_dtype: fp4``."""
_BLOCKS = Scheme(
    E4M3,
    Granularity.block(128, 128),
    E4M3.zero_point,
    activations=Activations(E4M3, Granularity.group(128), dynamic=True),
)
"""Scheme in the config for all other modules, where every quantised module is an FP4 expert."""
_LARGEST_BLOCK = 1 << 20


class FP8Dialect(Dialect):
    """``quant_method: fp8``."""

    name = "fp8"
    quant_methods = ("fp8",)
    settings = ("activation_scheme", "weight_block_size", "modules_to_not_convert")

    def read(self, keys: Keys) -> QuantizationConfig:
        inverse = keys.raw.get("weight_scale_semantics") == "inverse"
        excluded = dict.fromkeys((*keys.names("modules_to_not_convert"), *keys.names("ignored_layers")))
        rules: tuple[Rule[Scheme], ...] = tuple(
            Rule(keys.named(name), Keep(f"modules_to_not_convert: {name}")) for name in excluded
        )
        rules += tuple(_skips(keys))
        expert_dtype = keys.raw.get("expert_dtype", "fp8")
        if expert_dtype == "fp4":
            rules += (Rule(keys.search(_EXPERTS), _FP4),)
        elif expert_dtype != "fp8":
            raise UnsupportedError(f"{keys.where}: expert_dtype {expert_dtype!r} is not supported")
        granularity = _granularity(keys)
        activations = None if inverse else _activations(keys, granularity)
        scheme = Scheme(E4M3, granularity, E4M3.zero_point, activations=activations)
        form = "gptqmodel-fp8" if inverse else "deepseek-v4" if "expert_dtype" in keys.raw else "fp8"
        return QuantizationConfig(form, Rules(scheme, rules))

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        declared = declared_schemes(form, modules)
        small = [name for name, scheme in declared.items() if scheme.element == E2M1]
        other = next((name for name in small if expert_layer(name) is None), None)
        if other is not None:
            raise ConversionRefused(f"{form.name}: {other} is FP4; its config says so of experts only")
        schemes = {scheme for scheme in declared.values() if scheme.element == E4M3} or {_BLOCKS}
        if len(schemes) > 1:
            found = "; ".join(sorted(scheme.describe() for scheme in schemes))
            raise ConversionRefused(f"{form.name}: {found} in one checkpoint; its config says one scheme")
        (scheme,) = schemes
        granularity, inputs = scheme.granularity, scheme.activations
        if inputs is None:
            raise ConversionRefused(
                f"{form.name}: 16-bit activations; loaders of {form.name} quantise activations to 8 bits; "
                "use compressed-tensors"
            )
        exponents = all(layout.scale_dtype == _FP4.scale_dtype for layout in form.layouts)
        block = granularity.kind == "block"
        if inputs.granularity != _activation_granularity(granularity, inputs.dynamic):
            raise ConversionRefused(f"{form.name}: {inputs.describe()}; its config can't say so")
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic" if inputs.dynamic else "static",
            "weight_block_size": [granularity.outputs, granularity.channels] if block else None,
            "modules_to_not_convert": both_spellings(
                with_whole_experts(unquantized, modules), wrapped=in_wrapper([*modules, *unquantized])
            ),
            **({"expert_dtype": "fp4" if small else "fp8", "scale_fmt": "ue8m0"} if exponents else {}),
        }


def _skips(keys: Keys) -> Iterator[Rule[Scheme]]:
    """GPTQModel's rules for modules that are not quantised."""
    for text in keys.mapping("dynamic"):
        if not text.startswith("-:"):
            raise UnsupportedError(f"{keys.where}: dynamic rule {text!r}: FP8 settings of single modules")
        yield Rule(keys.pattern(text[2:]), Keep(f"dynamic rule {text!r}"))


def _granularity(keys: Keys) -> Granularity:
    size = keys.raw.get("weight_block_size")
    if size is None:
        method = keys.raw.get("weight_scale_method", "tensor")
        if not isinstance(method, str) or method not in _GPTQMODEL_GRANULARITIES:
            raise UnsupportedError(f"{keys.where}: weight_scale_method {method!r} is not supported")
        return _GPTQMODEL_GRANULARITIES[method]
    whole = isinstance(size, list) and len(size) == 2 and all(type(side) is int for side in size)
    if not whole or not all(1 <= side <= _LARGEST_BLOCK for side in size):
        raise CheckpointError(
            f"{keys.where}: weight_block_size: expected two positive integers, found {size!r}"
        )
    return Granularity.block(size[0], size[1])


def _activations(keys: Keys, granularity: Granularity) -> Activations:
    said = keys.raw.get("activation_scheme", "dynamic")
    if said not in ("dynamic", "static"):
        raise UnsupportedError(
            f"{keys.where}: activation_scheme {said!r} is not supported; marlinq reads dynamic and static"
        )
    dynamic = said == "dynamic"
    return Activations(E4M3, _activation_granularity(granularity, dynamic), dynamic)


def _activation_granularity(weights: Granularity, dynamic: bool) -> Granularity:
    """Granularity with which loaders quantise the inputs of weights with granularity ``weights``."""
    if not dynamic:
        return Granularity.tensor()
    return Granularity.group(weights.channels) if weights.kind == "block" else Granularity.channel()
