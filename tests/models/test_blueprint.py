from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.rules import Keep
from marlinq.models import ModelInstance, TensorNames, build_blueprint, describe
from tests.testing.mixtures import save_mixture
from tests.testing.tiny_models import CONFIGS, InMemory, in_memory, tiny_model


@pytest.mark.parametrize("name", CONFIGS)
def test_every_linear_is_either_in_a_block_or_kept_with_a_reason(name: str) -> None:
    model = tiny_model(name)
    blueprint = build_blueprint(model.config.to_dict(), source=name)
    assert len(blueprint.blocks) == model.config.num_hidden_layers
    quantised = {linear.name for linear in blueprint.projections()}
    kept = blueprint.kept.keys()
    assert not quantised & kept
    for full, module in model.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() == 2:
            assert full in quantised | kept
    assert all(keep.reason for keep in blueprint.kept.values())
    for linear in blueprint.projections():
        weight = model.get_parameter(f"{linear.name}.weight")
        shape = (linear.out_features, linear.in_features)
        assert tuple(weight.shape) == (tuple(reversed(shape)) if linear.transposed else shape)
        assert linear.bias == (f"{linear.name}.bias" in dict(model.named_parameters()))


def test_only_conv1d_layers_are_transposed() -> None:
    for name, transposed in (("gpt2", True), ("llama", False)):
        blueprint = describe(partial(tiny_model, name))
        assert {linear.transposed for linear in blueprint.projections()} == {transposed}


@pytest.mark.parametrize("beside", ["mlp.", ""], ids=["experts", "their parent"])
def test_a_list_of_expert_linears_is_found_and_its_router_beside_is_kept(beside: str) -> None:
    model = tiny_model("llama")
    for block in model.model.layers:
        block.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        block.get_submodule(beside.rstrip(".")).gate = torch.nn.Linear(64, 3)
    blueprint = describe(lambda: model)
    assert blueprint.routed
    names = {linear.name for linear in blueprint.projections()}
    assert "model.layers.1.mlp.experts.2" in names
    gate = f"model.layers.1.{beside}gate"
    assert gate not in names
    assert blueprint.kept[gate] == Keep("router of 3 experts")
    assert not describe(lambda: tiny_model("llama")).routed


def test_unknown_architectures_and_bad_configs_are_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="no model_type"):
        build_blueprint({"hidden_size": 8}, source="somewhere")
    with pytest.raises(CheckpointError, match="no-such-model"):
        build_blueprint({"model_type": "no-such-model"}, source="somewhere")
    with pytest.raises(UnsupportedError, match="somewhere: t5 is an encoder-decoder"):
        build_blueprint({"model_type": "t5"}, source="somewhere")
    with pytest.raises(UnsupportedError, match="BartForConditionalGeneration is an encoder-decoder"):
        build_blueprint(
            {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, source="somewhere"
        )
    with pytest.raises(CheckpointError, match="somewhere/config.json"):
        build_blueprint({"model_type": "llama", "hidden_size": "wide"}, source="somewhere")
    with pytest.raises(UnsupportedError, match="trust-remote-code"):
        build_blueprint({"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}, source="somewhere")


def test_a_quantization_config_in_the_source_is_ignored() -> None:
    config = tiny_model("llama").config.to_dict() | {
        "quantization_config": {"quant_method": "gptq", "bits": 4}
    }
    assert len(build_blueprint(config, source="llama").blocks) == 3


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_names_are_found_with_and_without_the_base_models_prefix(prefix: str) -> None:
    blueprint = describe(lambda: tiny_model("gpt2"))
    names = TensorNames(blueprint, {f"{prefix}wte.weight", f"{prefix}h.0.ln_1.weight"}, source="gpt2")
    assert names.require("transformer.h.0.ln_1.weight") == f"{prefix}h.0.ln_1.weight"
    assert names.require("lm_head.weight") == f"{prefix}wte.weight"
    assert names.own("lm_head.weight") is None
    assert names.find("transformer.wpe.weight") is None
    head = blueprint.by_name["lm_head"]
    assert names.stem(head, "weight") is None
    assert TensorNames(blueprint, {"lm_head.qweight"}, source="gpt2").stem(head, "qweight") == "lm_head"
    with pytest.raises(CheckpointError, match=r"gpt2.*'transformer\.wpe\.weight'.*'wpe\.weight'"):
        names.require("transformer.wpe.weight")


def test_names_that_differ_between_files_and_memory_are_found(tmp_path: Path) -> None:
    model = tiny_model("gpt_neox")
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert "embed_out.weight" in stored
    names = TensorNames(describe(lambda: model), stored, source="gpt_neox")
    assert names.own("lm_head.weight") == "embed_out.weight"
    assert {names.require(name) for name, _ in model.named_parameters()} == stored


def test_a_missing_head_that_is_not_tied_is_named() -> None:
    model = tiny_model("llama")
    tensors = in_memory(model).tensors
    del tensors["lm_head.weight"]
    names = TensorNames(describe(lambda: model), tensors, source="llama")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        names.require("lm_head.weight")


def test_blocks_are_loaded_in_the_asked_dtype_and_released() -> None:
    model = tiny_model("opt")
    blueprint = build_blueprint(model.config.to_dict(), source="opt")
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.bfloat16)
    name = blueprint.blocks[1].name
    with instance.loaded(name) as block:
        for inner, parameter in block.named_parameters():
            expected = model.get_parameter(f"{name}.{inner}")
            assert torch.equal(parameter, expected.to(torch.bfloat16))
        others = [p for n, p in instance.model.named_parameters() if not n.startswith(name + ".")]
        assert all(parameter.is_meta for parameter in others)
    assert all(parameter.is_meta for parameter in instance.model.parameters())


def test_a_wrong_shape_is_named() -> None:
    model = tiny_model("llama")
    tensors = in_memory(model).tensors
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 64)
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    instance = ModelInstance(blueprint, InMemory(tensors), device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight.*\[128, 64\].*\[3, 64\]"):
        instance.block(0)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "gpt2", "opt"])
def test_the_whole_model_equals_the_original(name: str) -> None:
    model = tiny_model(name)
    blueprint = build_blueprint(model.config.to_dict(), source=name)
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    whole = instance.whole_model()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, model(input_ids=ids).logits)
    for tied, owner in blueprint.tied.items():
        assert whole.get_parameter(tied) is whole.get_parameter(owner)


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    save_mixture(tmp_path, "nemotron-h")
    text = (tmp_path / "config.json").read_text()
    config = json.loads(text)
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    for written in (config, config | {"time_step_limit": [0.0, math.inf]}):
        built = build_blueprint(written, source="nemotron-h").build().config
        assert built.time_step_limit == [0.0, math.inf]


def test_only_the_tags_of_such_numbers_are_replaced() -> None:
    config = tiny_model("llama").config.to_dict()
    given = {
        "one": {"__float__": "-Infinity"},
        "other": {"__float__": "a word"},
        "two": {"__float__": "NaN", "x": 1},
    }
    built = build_blueprint(config | given, source="llama").build().config
    assert built.one == -math.inf
    assert (built.other, built.two) == (given["other"], given["two"])


def test_large_parameters_take_no_memory_while_a_model_is_built() -> None:
    # An embedding of 16 TB in float32, more than any machine gives.
    config = {"model_type": "llama", "vocab_size": 1 << 30, "hidden_size": 4096, "num_hidden_layers": 1}
    blueprint = build_blueprint({**config, "intermediate_size": 64}, source="model")
    assert blueprint.parameters["model.embed_tokens.weight"] == (1 << 30, 4096)
