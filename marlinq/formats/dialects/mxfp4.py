"""The config of GPT-OSS checkpoints (docs/formats.md): experts are MXFP4, everything else is not quantised.

``modules_to_not_convert`` lists modules that stay in 16 bits, where ``*`` matches any text. There are no
other settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.core.errors import ConversionRefused
from marlinq.core.float_elements import E2M1
from marlinq.core.rules import Keep, Rule, Rules
from marlinq.core.scheme import Scheme
from marlinq.core.schemes import MX_GROUP
from marlinq.formats.dialects.dialect import Dialect, QuantizationConfig
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.dialects.name_patterns import expert_layer, with_whole_experts
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec
from marlinq.formats.stacks import part_named

_EXPERTS = r"\.experts\.\d+\."
_SCHEME = Scheme(E2M1, MX_GROUP, E2M1.zero_point, "float8_e8m0fnu")


class MXFP4Dialect(Dialect):
    """``quant_method: mxfp4``."""

    name = "mxfp4"
    quant_methods = ("mxfp4",)
    settings = ("modules_to_not_convert",)

    def read(self, keys: Keys) -> QuantizationConfig:
        rules: list[Rule[Scheme]] = [
            Rule(keys.glob(name), Keep(f"modules_to_not_convert: {name}"))
            for name in keys.names("modules_to_not_convert")
        ]
        rules.append(Rule(keys.search(_EXPERTS), _SCHEME))
        return QuantizationConfig("gpt-oss", Rules(Keep("mxfp4 is of experts only"), tuple(rules)))

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        for name in modules:
            if expert_layer(name) is None:
                parent = name.split(".")[-2:][0]  # of a head the name itself
                raise ConversionRefused(
                    f"{form.name}: {name} is no linear of an expert; the format holds nothing else quantised "
                    f"(quantise the original with --override '{parent}=skip', or choose another format)"
                )
            if part_named(f"{name}.weight_packed") is None:
                raise ConversionRefused(
                    f"{form.name}: {name}: expected an expert's gate_proj, up_proj or down_proj, as GPT-OSS "
                    "has them"
                )
        kept = with_whole_experts(unquantized, modules)
        return {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "model.embed_tokens"]}
