r"""Rules about a language model inside another hold whatever a loader calls its modules.

How loaders rename modules, as prefixes, was read from ``hf_to_vllm_mapper`` of vLLM's models (qwen2_5_vl.py,
qwen3_vl.py, lfm2_vl.py, qwen2_5_omni_thinker.py) and from SGLang's, whose text models begin at ``model.``.
vLLM renames entries of lists that begin with such a prefix; a pattern, which begins with ``re:``, stays.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from marlinq.formats import FORMATS, ModuleSpec
from marlinq.formats.dialects import write_quantization_config
from marlinq.formats.dialects.name_patterns import in_wrapper
from tests.testing.schemes import scheme

RENAMINGS: dict[str, dict[str, str]] = {
    "as stored": {},
    "vLLM": {
        "model.language_model.": "language_model.model.",
        "model.visual.": "visual.",
        "thinker.model.": "language_model.model.",
        "thinker.lm_head": "language_model.lm_head",
        "lm_head": "language_model.lm_head",
        "model.layers.": "language_model.model.layers.",
    },
    "transformers": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head": "lm_head",
        "thinker.model.": "model.",
        "visual.": "model.visual.",
    },
    "SGLang": {
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head": "lm_head",
        "thinker.model.": "model.",
    },
}
PREFIXES = ("model.language_model", "language_model.model", "thinker.model", "model")


def renamed(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def names(prefix: str) -> tuple[list[str], list[str], list[str]]:
    """Modules of 4 bits, of 8 bits, and unquantised ones."""
    tower = "model.visual" if prefix == "model.language_model" else "visual"
    four = [f"{prefix}.layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "up")]
    eight = [f"{prefix}.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    kept = [f"{prefix}.layers.{i}.mlp.gate" for i in (0, 1)] + [
        f"{tower}.layers.0.self_attn.o_proj",
        "lm_head",
    ]
    return four, eight, kept


def spec(bits: int = 4, *, symmetric: bool = True) -> ModuleSpec:
    return ModuleSpec(64, 64, scheme(32, bits=bits, symmetric=symmetric))


def first(patterns: list[str], name: str) -> str | None:
    return next((each for each in patterns if re.match(each, name)), None)


@pytest.mark.parametrize("loader", RENAMINGS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_gptq_rules_hold(prefix: str, loader: str) -> None:
    four, eight, kept = names(prefix)
    assert in_wrapper([*four, *kept])
    modules = {**dict.fromkeys(four, spec()), **dict.fromkeys(eight, spec(8))}
    config = write_quantization_config(FORMATS["gptq"], modules, kept)
    patterns: dict[str, Any] = {rule[2:]: value for rule, value in config["dynamic"].items()}

    def said(name: str) -> Any:
        found = first(list(patterns), renamed(name, RENAMINGS[loader]))
        return None if found is None else patterns[found].get("bits", 0)

    assert {said(name) for name in kept[:2]} == {0}
    outcomes = {said(name) for name in eight}, {said(name) for name in four}
    assert outcomes in (({8}, {None}), ({None}, {4}))


@pytest.mark.parametrize("loader", RENAMINGS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_compressed_tensors_targets_and_ignored_modules_hold(prefix: str, loader: str) -> None:
    four, eight, kept = names(prefix)
    modules = {**dict.fromkeys(four, spec()), **dict.fromkeys(eight, spec(8))}
    config = write_quantization_config(FORMATS["compressed-tensors"], modules, kept)
    table = RENAMINGS[loader]
    listed = [each if each.startswith("re:") else renamed(each, table) for each in config["ignore"]]

    def ignored(name: str) -> bool:
        return any(re.match(e[3:], name) if e.startswith("re:") else e == name for e in listed)

    for name in kept:
        assert ignored(renamed(name, table)), name
    for name in modules:
        assert not ignored(renamed(name, table)), name
    for group in config["config_groups"].values():
        patterns = [each[3:] for each in group["targets"] if each.startswith("re:")]
        members = [n for n, s in modules.items() if s.scheme.element.bits == group["weights"]["num_bits"]]
        for name in modules:
            assert bool(first(patterns, renamed(name, table))) == (bool(patterns) and name in members)


@pytest.mark.parametrize("loader", RENAMINGS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_excluded_parts_of_names_hold_for_kept_modules_alone(prefix: str, loader: str) -> None:
    four, _, kept = names(prefix)
    # "mlp.gate" is a part of "mlp.gate_proj", which such a list can't tell apart.
    kept = [name.replace("mlp.gate", "mlp.router") for name in kept]
    asymmetric = spec(symmetric=False)
    config = write_quantization_config(FORMATS["awq"], dict.fromkeys(four, asymmetric), kept)
    table = RENAMINGS[loader]
    excluded = [renamed(each, table) for each in config["modules_to_not_convert"]]
    for name in kept[:2]:
        assert any(part in renamed(name, table) for part in excluded)
    for name in four:
        assert not any(part in renamed(name, table) for part in excluded)


def test_a_language_model_alone_keeps_its_one_name() -> None:
    four, eight, kept = names("model")
    alone = [name for name in kept if not name.startswith("visual")]
    assert not in_wrapper([*four, *alone])
    modules = {**dict.fromkeys(four, spec()), **dict.fromkeys(eight, spec(8))}
    config = write_quantization_config(FORMATS["compressed-tensors"], modules, alone)
    assert set(alone) == set(config["ignore"])


def test_a_draft_head_in_16_bits_is_named_as_a_whole() -> None:
    """SGLang asks for ``mtp.layers.0.self_attn.qkv_proj``; DeepSeek's draft is the block behind the last."""
    four = [f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qkv"]
    draft = ["mtp.fc", *(f"mtp.layers.0.self_attn.{part}_proj" for part in "qkv")]
    behind = ["model.layers.2.eh_proj", "model.layers.2.self_attn.q_a_proj"]
    asked = ["mtp.fc", "mtp.layers.0.self_attn.qkv_proj", "model.layers.2.self_attn.fused_qkv_a_proj"]
    for form in ("gptq", "compressed-tensors"):
        config = write_quantization_config(FORMATS[form], dict.fromkeys(four, spec()), [*draft, *behind])
        listed = config["dynamic"] if form == "gptq" else config["ignore"]
        patterns = [each[2:] if form == "gptq" else each[3:] for each in listed if each[:2] in ("-:", "re")]
        for name in asked:
            assert first(patterns, name), name
        for name in four:
            assert not first(patterns, name), name
    config = write_quantization_config(
        FORMATS["awq"], dict.fromkeys(four, spec(symmetric=False)), [*draft, "lm_head"]
    )
    assert config["modules_to_not_convert"] == ["lm_head", "mtp."]
