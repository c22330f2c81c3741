"""The config of AutoAWQ, which vLLM, SGLang and transformers read (docs/formats.md).

One group size and 4 bits for the whole checkpoint, always with stored zero points; modules are excluded by a
part of their name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.core.errors import ConversionRefused, UnsupportedError
from marlinq.core.rules import Keep, Rule, Rules
from marlinq.core.scheme import INT4, Scheme
from marlinq.formats.dialects.dialect import Dialect, QuantizationConfig, declared_schemes
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.dialects.name_patterns import (
    WHOLE_DRAFT,
    in_wrapper,
    is_head,
    whole_drafts,
    with_whole_experts,
    without_prefix,
)
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec


class AWQDialect(Dialect):
    """``quant_method: awq``."""

    name = "awq"
    quant_methods = ("awq",)
    marks = ("w_bit", "zero_point")
    settings = ("bits", "group_size", "zero_point", "version", "modules_to_not_convert")

    def read(self, keys: Keys) -> QuantizationConfig:
        version = str(keys.raw.get("version") or keys.raw.get("format") or "gemm").lower()
        if version != "gemm":
            raise UnsupportedError(
                f"{keys.where}: AWQ version {version!r} is not supported; marlinq reads gemm"
            )
        bits = keys.integer("bits", "w_bit")
        if bits != INT4.bits:
            raise UnsupportedError(
                f"{keys.where}: AWQ with {bits} bits is not supported; the layout is 4-bit"
            )
        scheme = Scheme(INT4, keys.granularity("group_size", "q_group_size"), "stored")
        rules: tuple[Rule[Scheme], ...] = tuple(
            Rule(keys.containing(name), Keep(f"modules_to_not_convert: {name}"))
            for name in keys.names("modules_to_not_convert")
        )
        return QuantizationConfig("awq", Rules(scheme, rules))

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        schemes = declared_schemes(form, modules)
        sizes = sorted({scheme.granularity.group_size for scheme in schemes.values()})
        if len(sizes) > 1:
            raise ConversionRefused(
                f"awq: group sizes {sizes} in one checkpoint; AWQ configs have no per-module settings"
            )
        drafts, others = whole_drafts(unquantized, schemes)
        excluded = with_whole_experts(others, schemes)
        if WHOLE_DRAFT in drafts:
            excluded.append("mtp.")
        if in_wrapper([*schemes, *unquantized]):
            excluded = list(dict.fromkeys(map(without_prefix, excluded)))
        for skipped in excluded:
            caught = next((name for name in schemes if skipped in name), None)
            if caught is not None:
                raise ConversionRefused(
                    f"awq: {skipped} is not quantised and {caught} is; AWQ configs exclude modules by a part "
                    "of their name, which can't tell these two apart"
                )
        return {
            "quant_method": "awq",
            "bits": INT4.bits,
            "group_size": sizes[0],
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": excluded,
            "lm_head": any(is_head(name) for name in schemes),
        }

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {"quantize_config.json": config}
