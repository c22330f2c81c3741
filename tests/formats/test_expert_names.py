"""How configs name the experts of a layer: one by one, and as the one module that loaders make of them."""

from __future__ import annotations

import re

import pytest

from marlinq.formats import FORMATS, ModuleSpec
from marlinq.formats.dialects import Keys, dialect_of, write_quantization_config
from marlinq.formats.dialects.name_patterns import expert_layer, names_pattern, with_whole_experts
from tests.testing.schemes import scheme

PARTS = ("gate_proj", "up_proj", "down_proj")
SPEC = ModuleSpec(64, 64, scheme(32))


def layer(number: int, experts: int = 300) -> list[str]:
    return [f"model.layers.{number}.mlp.experts.{e}.{part}" for e in range(experts) for part in PARTS]


def test_an_expert_knows_its_layer() -> None:
    assert expert_layer("model.layers.3.mlp.experts.17.up_proj") == "model.layers.3.mlp.experts"
    for other in ("model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.mlp.experts", "lm_head"):
        assert expert_layer(other) is None


def test_a_layer_is_named_once_unless_it_is_parted() -> None:
    members = ["a.q_proj", *layer(0, 2), *layer(1, 2)]
    assert with_whole_experts(members, ["b"]) == [
        "a.q_proj",
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    parted = with_whole_experts(members, ["model.layers.1.mlp.experts.2.up_proj"])
    assert parted == ["a.q_proj", "model.layers.0.mlp.experts", *layer(1, 2)]


def test_a_pattern_of_hundreds_of_experts_is_short_and_exact() -> None:
    others = [*layer(1), "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_experts.up_proj"]
    pattern = names_pattern(layer(0), others)
    assert len(pattern) < 100
    compiled = re.compile(pattern)
    assert all(compiled.match(name) for name in layer(0))
    # The name that vLLM looks up for the layer.
    assert compiled.match("model.layers.0.mlp.experts")
    assert not any(compiled.match(name) for name in others)


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors"])
def test_a_kept_layer_is_found_under_both_kinds_of_name(form: str) -> None:
    quantised = dict.fromkeys(layer(0), SPEC)
    kept = [*layer(1), "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    if form == "awq":
        quantised = {name: ModuleSpec(64, 64, scheme(32, symmetric=False)) for name in quantised}
    raw = write_quantization_config(FORMATS[form], quantised, kept)
    rules = dialect_of(raw, "config").read(Keys(raw, "config")).rules
    assert all(rules.scheme(name) is not None for name in quantised)
    assert all(rules.scheme(name) is None for name in kept)
    if form != "compressed-tensors":
        assert rules.scheme("model.layers.1.mlp.experts") is None
        assert rules.scheme("model.layers.0.mlp.experts") is not None
    # Experts in one tensor have no names of their own.
    raw = write_quantization_config(FORMATS[form], quantised, ["model.layers.1.mlp.experts"])
    rules = dialect_of(raw, "config").read(Keys(raw, "config")).rules
    assert all(rules.scheme(name) is None for name in layer(1))
    assert all(rules.scheme(name) is not None for name in quantised)
