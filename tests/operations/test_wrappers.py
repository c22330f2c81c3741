"""Models that see or hear: their language model is quantised with GPTQ on text, converted and run; the rest
of the folder stays as it is, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification

import marlinq
from lab.models.families import families, random_model
from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, untied_config
from marlinq.core.errors import MarlinqError, UnsupportedError
from marlinq.models import build_blueprint
from marlinq.operations.quantize.planning import plan_output
from tests.testing.mixtures import calibration_text
from tests.testing.runnable_folders import save_tokenizer

SAMPLE = "qwen3_vl"
FAMILIES = (
    "qwen2_5_vl",
    "qwen3_5",
    "mistral3",
    "gemma3",
    "internvl",
    "glm4v",
    "llava",
    "llama4",
    "qwen2_5_omni_thinker",
    "blip-2",
)
SIDE_FILES = {
    "preprocessor_config.json": '{"image_mean": [0.5, 0.5, 0.5],  "do_resize": true}',
    "processor_config.json": '{"image_seq_length": 4}\n\n',
    "chat_template.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize(
    "model_type", [SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)]
)
def test_the_language_model_is_quantised_and_the_rest_stays(model_type: str, tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "int4"
    model = random_model(next(each for each in families() if each.model_type == model_type))
    model.save_pretrained(source)
    save_tokenizer(source)
    for name, text in SIDE_FILES.items():
        (source / name).write_text(text)
    recipe = marlinq.Recipe(
        group_size=32, samples=4, max_length=24, calibration=(str(calibration_text(tmp_path)),)
    )
    marlinq.quantize(source, out, recipe=recipe, device="cpu", progress=False, message=lambda text: None)
    converted = tmp_path / "awq"
    marlinq.convert(out, converted, target_format="awq")
    before = Checkpoint.open(source)
    for folder in (out, converted):
        for name in SIDE_FILES:
            assert (folder / name).read_bytes() == (source / name).read_bytes()
        view = QuantizedCheckpoint.of(Checkpoint.open(folder))
        assert view is not None
        # Nothing that sees or hears is touched, and little of the decoder.
        towers = [name for name in before.tensors if name in view.passthrough]
        assert any("vision" in name or "visual" in name or "audio" in name for name in towers)
        assert not any("vision" in name or "visual" in name or "audio" in name for name in view.modules)
        for name in towers:
            assert torch.equal(view.checkpoint.tensor(name), before.tensor(name)), name
        config = json.loads((folder / "config.json").read_text())
        config.pop("quantization_config")
        # A head of its own is said to be one.
        assert untied_config(config) == untied_config(before.config)
    report = marlinq.verify(converted, against=source, device="cpu", progress=False)
    assert report.ok, report.checks
    loaded = marlinq.load(converted, device="cpu", dtype="float32", exact=True, progress=False)
    if model_type == "blip-2":
        # It can't run without an image; what generation says is one line.
        with pytest.raises(MarlinqError):
            marlinq.generate(loaded, [5, 6, 7], max_new_tokens=3)
    else:
        assert len(marlinq.generate(loaded, [5, 6, 7], max_new_tokens=3).tokens) == 3


def ignored(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether ``ignore`` of a compressed-tensors config holds a module's name."""
    entries = config["quantization_config"]["ignore"]
    return lambda module: any(
        re.match(entry[3:], module) if entry.startswith("re:") else entry == module for entry in entries
    )


@pytest.mark.parametrize("model_type", ["llava", "internvl", "qwen2_5_vl", "mistral3"])
def test_unquantised_linears_are_named_as_in_files_and_as_in_the_model(
    model_type: str, tmp_path: Path
) -> None:
    """Servers look up names of files, transformers those of its modules; without them it takes towers for
    quantised and leaves their weights random."""
    model = random_model(next(each for each in families() if each.model_type == model_type))
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    blueprint = build_blueprint(checkpoint.config, source=str(tmp_path), tensors=checkpoint.tensors)
    recipe = marlinq.Recipe(format="compressed-tensors", group_size=32)
    plan = plan_output(checkpoint, blueprint, recipe)
    named = ignored(plan.config)
    stored = {name.removesuffix(".weight") for name in checkpoint.tensors}
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert not linears <= stored, "no name differs between files and model"
    assert set(plan.modules) < linears
    for name in linears:
        assert named(name) == (name not in plan.modules), name
    for planned in plan.modules.values():
        assert not named(planned.stored)


def test_a_conversion_names_unquantised_linears_as_in_the_model_too(tmp_path: Path) -> None:
    model = random_model(next(each for each in families() if each.model_type == "llava"))
    model.save_pretrained(tmp_path / "model")
    recipe = marlinq.Recipe(method="rtn", group_size=32)
    marlinq.quantize(tmp_path / "model", tmp_path / "gptq", recipe=recipe, device="cpu", progress=False)
    marlinq.convert(tmp_path / "gptq", tmp_path / "packed", target_format="compressed-tensors")
    named = ignored(json.loads((tmp_path / "packed" / "config.json").read_text()))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert any(".vision_tower." in name for name in linears)
    for name in linears:
        assert named(name) == (".language_model." not in name), name


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_without_a_head_keeps_its_class(tmp_path: Path, auto: Any) -> None:
    """An embedding model, a classifier: quantised, verified and loaded as what the config names. What needs
    predictions of tokens is refused in one line."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    source, out = tmp_path / "model", tmp_path / "int4"
    model = auto.from_config(CONFIG_MAPPING["qwen3"](**sizes, **heads))
    model.save_pretrained(source)
    recipe = marlinq.Recipe(method="rtn", group_size=32)
    marlinq.quantize(source, out, recipe=recipe, device="cpu", progress=False)
    report = marlinq.verify(out, against=source, logits=True, device="cpu", progress=False)
    assert report.ok
    states = {check.name: check.status for check in report.checks}
    assert (states["layers"], states["logits"]) == ("passed", "skipped")
    loaded = marlinq.load(out, device="cpu", dtype="float32", exact=True, progress=False)
    assert type(loaded.model) is type(model)
    assert loaded.model.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state.shape == (1, 3, 64)
    for refused in (
        lambda: marlinq.generate(loaded, [5, 6, 7], max_new_tokens=3),
        lambda: marlinq.evaluate(loaded, windows=1, length=8, progress=False),
        lambda: marlinq.quantize(source, tmp_path / "again", device="cpu", progress=False),
    ):
        with pytest.raises(UnsupportedError, match="has no output head"):
            refused()
    assert not (tmp_path / "again.partial").exists()
