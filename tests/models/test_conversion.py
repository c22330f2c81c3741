"""Tensors that files hold otherwise than the module tree are read as transformers reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import marlinq
from lab.models.families import families, random_model
from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.errors import CheckpointError
from marlinq.models import ModelInstance, build_blueprint, converted, find_conversions
from marlinq.operations.quantize.override import Override

# Rules of single modules are what is tested, not whether a server takes them.
pytestmark = pytest.mark.filterwarnings("ignore:.*make one layer of them")

# Split, joined, with other rows, and all of it.
FAMILIES = ("hrm_text", "olmo_hybrid", "kimi_k25", "molmo2", "minimax_m3_vl")


def saved(model_type: str, folder: Path) -> PreTrainedModel:
    """A tiny random model, and the folder that transformers saves of it."""
    model = random_model(next(each for each in families() if each.model_type == model_type))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_parameter_gets_its_value(model_type: str, tmp_path: Path) -> None:
    model = saved(model_type, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    conversions = find_conversions(blueprint, checkpoint.tensors, source="model")
    assert conversions
    view = converted(checkpoint, conversions)
    instance = ModelInstance(blueprint, view, device=torch.device("cpu"), dtype=torch.float32)
    instance.whole_model()
    found = dict(instance.model.named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name
    # Tensors in the model's layout are not converted again.
    assert not find_conversions(blueprint, view.tensors, source="model")


def test_quantised_tensors_take_the_models_names_and_others_keep_theirs(tmp_path: Path) -> None:
    saved("hrm_text", tmp_path / "model")
    recipe = marlinq.Recipe(
        method="rtn", group_size=32, overrides=(Override(r"layers\.0\.mlp\.gate_proj$", skip=True),)
    )
    marlinq.quantize(tmp_path / "model", tmp_path / "int4", recipe=recipe, device="cpu", progress=False)
    view = QuantizedCheckpoint.of(Checkpoint.open(tmp_path / "int4"))
    assert view is not None
    assert "model.L_module.layers.0.self_attn.q_proj" in view.modules
    # Beside up_proj, which is quantised, gate_proj stands by itself.
    assert "model.L_module.layers.0.mlp.gate_proj.weight" in view.passthrough
    assert not [name for name in view.passthrough if name.startswith("model.L_") and "gqkv" in name]
    # The other stack of layers is not quantised and stays as it was.
    assert "model.H_module.layers.0.attn.gqkv_proj.weight" in view.passthrough
    report = marlinq.verify(tmp_path / "int4", against=tmp_path / "model", device="cpu", progress=False)
    assert report.ok, report.checks
    loaded = marlinq.load(tmp_path / "int4", device="cpu", dtype="float32", exact=True, progress=False)
    original = marlinq.load(tmp_path / "model", device="cpu", dtype="float32", progress=False)
    for name in ("model.H_module.layers.0.self_attn.k_proj", "model.L_module.layers.0.mlp.gate_proj"):
        assert torch.equal(
            loaded.model.get_parameter(f"{name}.weight"), original.model.get_parameter(f"{name}.weight")
        )


def test_a_tensor_that_does_not_fit_its_rule_is_named(tmp_path: Path) -> None:
    saved("molmo2", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    name = next(name for name in checkpoint.tensors if "att_proj" in name)
    shorter = dict(checkpoint.tensors)
    shorter[name] = replace(shorter[name], shape=(3, shorter[name].shape[1]))
    with pytest.raises(CheckpointError, match=rf"model: tensor '{name}': \[3, 64\]: transformers' rule"):
        find_conversions(blueprint, shorter, source="model")
