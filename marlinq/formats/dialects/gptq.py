"""The config of AutoGPTQ and GPTQModel, which vLLM, SGLang and transformers read (docs/formats.md).

It describes GPTQ v1, GPTQ v2, Marlin and Marlin-24 tensors; ``checkpoint_format`` says which. ``dynamic``
rules are matched with ``re.match`` against the full module name, the first match wins, and ``-:`` in front of
a pattern leaves its modules unquantised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.rules import Keep, Rule, Rules
from marlinq.core.scheme import Scheme, ZeroPoint
from marlinq.core.version import __version__
from marlinq.formats.dialects.dialect import Dialect, QuantizationConfig, declared_schemes, majority
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.dialects.name_patterns import (
    expert_layer,
    in_block,
    in_wrapper,
    inside_block,
    is_head,
    names_pattern,
    whole_drafts,
)
from marlinq.formats.format import FORMATS, Format
from marlinq.formats.layouts import ModuleSpec
from marlinq.formats.layouts.gptq import WORD_ADD_WRITER

_LAYOUTS = {"gptq": "gptq", "gptq_v2": "gptq-v2", "marlin": "marlin", "marlin_24": "gptq-marlin-24"}
"""Layouts by their ``checkpoint_format``."""
_CHECKPOINT_FORMATS = {layout: said for said, layout in _LAYOUTS.items()}


class GPTQDialect(Dialect):
    """``quant_method: gptq``."""

    name = "gptq"
    quant_methods = ("gptq", "marlin")
    settings = ("bits", "group_size", "sym", "desc_act", "checkpoint_format")

    def read(self, keys: Keys) -> QuantizationConfig:
        raw = keys.raw
        layout = raw.get("checkpoint_format") or raw.get("format") or "gptq"
        if raw.get("is_marlin_format") or raw.get("quant_method") == "marlin":
            layout = "marlin"
        if not isinstance(layout, str) or layout not in _LAYOUTS:
            raise UnsupportedError(
                f"{keys.where}: checkpoint_format {layout!r} is not supported; "
                f"marlinq reads {', '.join(_LAYOUTS)}"
            )
        default = Scheme(
            element=keys.element("bits", "w_bit", "wbits"),
            granularity=keys.granularity("group_size"),
            zero_point=_zero_point(keys, "stored"),
            act_order=bool(keys.boolean("desc_act", False)),
            sparsity=FORMATS[_LAYOUTS[layout]].sparsity,
        )
        rules: list[Rule[Scheme]] = []
        for text, overrides in keys.mapping("dynamic").items():
            skip = text.startswith("-:")
            pattern = keys.pattern(text[2:] if text[:2] in ("-:", "+:") else text)
            outcome = Keep(f"dynamic rule {text!r}") if skip else _override(keys, text, overrides, default)
            rules.append(Rule(pattern, outcome))
        return QuantizationConfig(_LAYOUTS[layout], Rules(default, tuple(rules)), _zero_writer(keys))

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        schemes = declared_schemes(form, modules)
        default = majority(schemes)
        # One flag for all modules: loaders still get the right weights of a module whose g_idx is trivial.
        act_order = any(spec.scheme.act_order for spec in modules.values())
        dynamic: dict[str, Any] = {}
        wrapped = in_wrapper([*schemes, *unquantized])
        drafts, others = whole_drafts(unquantized, schemes)
        dynamic.update({f"-:{pattern}": {} for pattern in drafts})
        skipped = [name for name in others if in_block(name)]
        if skipped:
            dynamic["-:" + names_pattern(skipped, schemes, wrapped=wrapped)] = {}
        for other in dict.fromkeys(scheme for scheme in schemes.values() if scheme != default):
            members = [name for name, scheme in schemes.items() if scheme == other]
            dynamic["+:" + names_pattern(members, unquantized, wrapped=wrapped)] = {
                "bits": other.element.bits,
                "group_size": other.granularity.group_size,
                "sym": not other.stores_zeros,
                "desc_act": act_order,
            }
        layout_key = _CHECKPOINT_FORMATS[form.name]
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": default.element.bits,
            "group_size": default.granularity.group_size,
            "desc_act": act_order,
            "sym": not default.stores_zeros,
            "checkpoint_format": layout_key,
            "format": layout_key,
            "pack_dtype": "int32",
            "lm_head": any(is_head(name) for name in schemes),
            "meta": {"quantizer": [f"marlinq:{__version__}"]},
        }
        if dynamic:
            config["dynamic"] = dynamic
        inside = list(dict.fromkeys(inside_block(name) for name in schemes if in_block(name)))
        fused = any(expert_layer(name) for name in schemes)
        kept_inside = {inside_block(name) for name in unquantized if in_block(name)}
        if kept_inside and not fused and not config["lm_head"] and not kept_inside & set(inside):
            # transformers' loader ignores dynamic rules, but honours this list of names inside a block. Not
            # written for a quantised head or experts: it can't load those, and vLLM would need the head
            # listed.
            config["modules_in_block_to_quantize"] = [inside]
        return config

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        # GPTQModel reads this file before config.json, so both hold the same settings.
        return {"quantize_config.json": config}


def _zero_point(keys: Keys, default: ZeroPoint) -> ZeroPoint:
    # Without ``sym`` the stored zero points decide.
    symmetric = keys.boolean("sym", default == "midpoint")
    return "midpoint" if symmetric else "stored"


def _override(keys: Keys, text: str, overrides: object, default: Scheme) -> Scheme:
    if not isinstance(overrides, dict):
        raise CheckpointError(f"{keys.where}: dynamic rule {text!r}: expected an object, found {overrides!r}")
    inner = Keys(overrides, f"{keys.where}: dynamic rule {text!r}")
    return Scheme(
        element=inner.element("bits") if "bits" in overrides else default.element,
        granularity=inner.granularity("group_size") if "group_size" in overrides else default.granularity,
        zero_point=_zero_point(inner, default.zero_point),
        act_order=bool(inner.boolean("desc_act", default.act_order)),
        sparsity=default.sparsity,
    )


def _zero_writer(keys: Keys) -> str | None:
    quantizer = keys.mapping("meta").get("quantizer")
    entries = quantizer if isinstance(quantizer, list) else [quantizer]
    named = any(isinstance(entry, str) and entry.startswith("gptqmodel") for entry in entries)
    return WORD_ADD_WRITER if named else None
