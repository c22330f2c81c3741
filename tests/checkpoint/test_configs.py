"""quantization_config: what is emitted reads back as the same settings, in every dialect."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from marlinq.checkpoint import (
    Checkpoint,
    QuantizedCheckpoint,
    read_quantization_config,
    replace_quantization_config,
)
from marlinq.core.errors import CheckpointError, ConversionRefused, UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT8
from marlinq.formats import FORMATS, ModuleSpec
from marlinq.formats.dialects import DIALECTS, write_quantization_config
from tests.testing.layouts import INTEGERS
from tests.testing.original_folders import save_tiny
from tests.testing.schemes import scheme

FOLDER = Path("checkpoint")
AUTO_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
INNER = [f"self_attn.{part}_proj" for part in "qkvo"] + [
    f"mlp.{part}_proj" for part in ("gate", "up", "down")
]
NAMES = [f"model.layers.{layer}.{inner}" for layer in (0, 1, 2, 10) for inner in INNER] + ["lm_head"]


def module(group_size: int, **changes: Any) -> ModuleSpec:
    return ModuleSpec(256, 256, replace(scheme(group_size), **changes))


def write(name: str, modules: dict[str, ModuleSpec], unquantized: list[str]) -> dict[str, Any]:
    return write_quantization_config(FORMATS[name], modules, unquantized)


def extra_files(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return dict(DIALECTS[FORMATS[name].dialect].extra_files(config))


KINDS = {
    "usual": module(64),
    "finer": module(32),
    "channelwise": module(-1),
    "asymmetric": module(64, zero_point="stored"),
    "eight": module(64, element=INT8),
    "one group": ModuleSpec(64, 256, scheme(-1)),
}


def read(config: dict[str, Any]) -> Any:
    found = read_quantization_config(FOLDER, {"quantization_config": json.loads(json.dumps(config))})
    assert found is not None
    return found


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[dict[str, ModuleSpec], list[str]]:
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True))
    choices = [draw(st.sampled_from([*kinds, kinds[0], kinds[0], None])) for _ in NAMES]
    modules = {name: KINDS[kind] for name, kind in zip(NAMES, choices, strict=True) if kind is not None}
    return modules, [name for name in NAMES if name not in modules]


@pytest.mark.parametrize("layout", ["gptq", "gptq-v2", "marlin", "compressed-tensors"])
@settings(max_examples=60, deadline=None)
@given(mixture=mixtures())
def test_mixed_settings_and_skips_read_back(
    layout: str, mixture: tuple[dict[str, ModuleSpec], list[str]]
) -> None:
    modules, unquantized = mixture
    if not modules:
        with pytest.raises(ConversionRefused, match="no module is quantised"):
            write(layout, modules, unquantized)
        return
    found = read(write(layout, modules, unquantized))
    assert found.format == layout
    for name, spec in modules.items():
        said = found.rules.scheme(name)
        assert said is not None, name
        # One scale per channel may be written as -1 or as a group of K.
        wanted = INTEGERS[layout].as_stored(spec.scheme)
        assert said.for_channels(spec.in_features) == wanted, name
    for name in unquantized:
        # GPTQ loaders leave what is outside the blocks alone unless lm_head is true.
        if name != "lm_head" or layout == "compressed-tensors":
            assert found.rules.scheme(name) is None, name


@given(skipped=st.lists(st.sampled_from(NAMES[:-1]), max_size=20, unique=True))
@settings(max_examples=40, deadline=None)
def test_awq_reads_back(skipped: list[str]) -> None:
    modules = {name: KINDS["usual"] for name in NAMES[:-1] if name not in skipped}
    if not modules:
        return
    found = read(write("awq", modules, [*skipped, "lm_head"]))
    assert all(found.rules.scheme(name).granularity == Granularity.group(64) for name in modules)
    assert all(found.rules.scheme(name) is None for name in [*skipped, "lm_head"])


def test_awq_refuses_what_its_config_cannot_say() -> None:
    with pytest.raises(ConversionRefused, match=r"group sizes \[32, 64\]"):
        write("awq", {"a.0.x": KINDS["usual"], "a.0.y": KINDS["finer"]}, [])
    with pytest.raises(ConversionRefused, match=r"mlp\.gate is not quantised and .*mlp\.gate_proj is"):
        write("awq", {"l.0.mlp.gate_proj": KINDS["usual"]}, ["l.0.mlp.gate"])


@pytest.mark.parametrize("layout", INTEGERS)
def test_a_single_group_of_the_usual_size_is_no_exception(layout: str) -> None:
    modules = {"l.0.a": KINDS["usual"], "l.0.b": KINDS["one group"]}
    config = write(layout, modules, [])
    assert "dynamic" not in config
    assert len(config.get("config_groups", "1")) == 1
    assert read(config).rules.scheme("l.0.b").granularity == Granularity.group(64)


def test_the_keys_that_loaders_need() -> None:
    modules, unquantized = dict.fromkeys(NAMES[:-1], KINDS["usual"]), ["lm_head"]
    for layout, stored in (("gptq", "gptq"), ("gptq-v2", "gptq_v2"), ("marlin", "marlin")):
        config = write(layout, modules, unquantized)
        assert config["quant_method"] == "gptq"
        assert (config["bits"], config["group_size"], config["sym"]) == (4, 64, True)
        assert config["desc_act"] is False
        assert config["checkpoint_format"] == stored
        assert config["lm_head"] is False
        assert extra_files(layout, config) == {"quantize_config.json": config}
    awq = write("awq", modules, unquantized)
    assert (awq["quant_method"], awq["version"], awq["zero_point"]) == ("awq", "gemm", True)
    ct = write("compressed-tensors", modules, unquantized)
    assert (ct["format"], ct["quantization_status"], ct["ignore"]) == (
        "pack-quantized",
        "compressed",
        ["lm_head"],
    )
    allowed = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder"}
    assert all(set(group["weights"]) <= allowed for group in ct["config_groups"].values())
    assert extra_files("compressed-tensors", ct) == {}


def test_activation_order_is_said() -> None:
    modules = {"l.0.a": module(64, act_order=True), "l.0.b": KINDS["finer"]}
    config = write("gptq", modules, [])
    assert config["desc_act"] is True
    assert read(config).rules.scheme("l.0.a").act_order
    assert read(config).rules.scheme("l.0.b").act_order


def test_rules_match_the_fused_names_of_whole_sets_only() -> None:
    modules = dict.fromkeys(NAMES[:-1], KINDS["usual"])
    for name in list(modules):
        if name.startswith("model.layers.1.") and "self_attn" in name:
            modules[name] = KINDS["finer"]
    rules = write("gptq", modules, ["lm_head"])["dynamic"]
    (pattern,) = (re.compile(rule[2:]) for rule in rules)
    assert pattern.match("model.layers.1.self_attn.qkv_proj")
    assert not pattern.match("model.layers.10.self_attn.qkv_proj")
    assert not pattern.match("model.layers.1.mlp.gate_up_proj")
    del modules["model.layers.1.self_attn.k_proj"]
    rules = write("gptq", modules, ["model.layers.1.self_attn.k_proj"])["dynamic"]
    assert not any(re.match(rule[2:], "model.layers.1.self_attn.qkv_proj") for rule in rules)


@pytest.mark.parametrize(
    ("parts", "fused"),
    [
        (("in_proj_b", "in_proj_a"), "in_proj_ba"),
        (("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
        (("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
        (("w1", "w3"), "w13"),
    ],
)
def test_kept_parts_are_found_by_their_fused_name(parts: tuple[str, ...], fused: str) -> None:
    """A server asks for the layer that it makes of a delta net's gates, or of latent attention's inputs."""
    modules = {f"model.layers.{i}.mixer.out_proj": KINDS["usual"] for i in (0, 1)}
    kept = [f"model.layers.{i}.mixer.{part}" for i in (0, 1) for part in parts]
    (rule,) = write("gptq", modules, kept)["dynamic"]
    assert rule.startswith("-:")
    assert re.match(rule[2:], f"model.layers.1.mixer.{fused}")
    assert not re.match(rule[2:], "model.layers.1.mixer.out_proj")


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"old": 1}},
        {"compression_config": {"old": 1}},
        {"text_config": {"hidden_size": 4, "quantization_config": {"old": 1}}},
        {},
    ],
)
def test_the_old_config_is_replaced_wherever_it_stood(config: dict[str, Any]) -> None:
    before = json.dumps(config)
    result = replace_quantization_config({"model_type": "x", **config}, {"new": 2})
    assert result["quantization_config"] == {"new": 2}
    assert "old" not in json.dumps(result)
    assert result["model_type"] == "x"
    assert result.get("text_config", {"hidden_size": 4}) == {"hidden_size": 4}
    assert json.dumps(config) == before


@pytest.mark.parametrize("place", ["top", "compression", "text", "quantize_config.json", "quant_config.json"])
def test_a_config_is_found_where_peers_put_it(tmp_path: Path, place: str) -> None:
    raw = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM", "quant_method": "awq"}
    config: dict[str, Any] = {}
    if place == "top":
        config = {"quantization_config": raw}
    elif place == "compression":
        config = {"compression_config": raw}
    elif place == "text":
        config = {"text_config": {"quantization_config": raw}}
    else:
        del raw["quant_method"]
        (tmp_path / place).write_text(json.dumps(raw))
    found = read_quantization_config(tmp_path, config)
    assert found is not None
    assert found.format == "awq"
    assert found.rules.scheme("x").granularity == Granularity.group(64)  # type: ignore[union-attr]


def test_a_config_that_describes_nothing_is_no_quantisation(tmp_path: Path) -> None:
    assert read_quantization_config(tmp_path, {"quantization_config": {}}) is None
    nested = {"text_config": {"quantization_config": {}}}
    assert read_quantization_config(tmp_path, nested) is None


def test_a_leftover_config_over_floats_is_told_and_left_aside(tmp_path: Path) -> None:
    """A model that was trained with bitsandbytes and merged keeps its config; packed tensors stay refused."""
    folder = save_tiny("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="'bitsandbytes' is not supported.*read as an unquantised one"):
        assert QuantizedCheckpoint.of(Checkpoint.open(folder)) is None
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 1, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match="'bitsandbytes' is not supported"):
        QuantizedCheckpoint.of(Checkpoint.open(folder))


def test_weights_that_no_file_holds_quantised_are_refused() -> None:
    config = write("compressed-tensors", {NAMES[0]: KINDS["usual"]}, [])
    read(config)
    config["config_groups"]["group_0"]["weights"]["dynamic"] = True
    with pytest.raises(
        UnsupportedError, match="group_0.weights: dynamic: weights that are quantised when loaded"
    ):
        read(config)


def test_transformers_takes_no_shared_experts_for_routed_ones() -> None:
    """It takes the first group whose patterns have the word "experts" for that of the routed ones."""
    layer = "model.layers.0.mlp"
    routed = {f"{layer}.experts.{number}.up_proj": KINDS["usual"] for number in range(3)}
    shared = {f"{layer}.shared_experts.up_proj": KINDS["eight"]}
    for modules in (routed | shared, dict(list(routed.items())[:1]) | shared):
        groups = write("compressed-tensors", modules, [])["config_groups"]
        first = next(
            group
            for group in groups.values()
            if any(each.startswith("re:") and "experts" in each for each in group["targets"])
        )
        assert first["weights"]["num_bits"] == 4
        found = read(write("compressed-tensors", modules, []))
        for name, spec in modules.items():
            assert found.rules.outcome(name).element == spec.scheme.element
    only = write("compressed-tensors", routed, [])["config_groups"]
    assert [group["targets"] for group in only.values()] == [["Linear"]]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({**AUTO_GPTQ, "dynamic": False}, "dynamic: expected an object, found False"),
        ({**AUTO_GPTQ, "dynamic": []}, r"dynamic: expected an object, found \[\]"),
        ({"quant_method": "fp8", "modules_to_not_convert": ""}, "expected a list of module names, found ''"),
    ],
)
def test_values_of_another_type_are_not_taken_for_absent_ones(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_quantization_config(FOLDER, {"quantization_config": raw})
    key = next(key for key, value in raw.items() if not value)
    assert read_quantization_config(FOLDER, {"quantization_config": {**raw, key: None}}) is not None
