"""A module whose config says the scheme of another module of the same checkpoint is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.formats.dialects import write_quantization_config
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.faults import passes
from tests.testing.foreign_floats import rewrite
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model

LINEARS = ("down_proj", "gate_proj", "up_proj", "q_proj", "k_proj", "v_proj", "o_proj")
DOWN = "model.layers.0.mlp.down_proj"
MIXTURES = {
    "compressed-tensors": ("fp8", "int4", "int8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"),
    "modelopt": ("nvfp4", "fp8-static"),
    "gptq": ("int4", "int8"),
}
"""Schemes that one checkpoint of a format may mix; the first linear gets the first, and so on."""


# Schemes of single modules are what is tested, not whether a server takes them.
@pytest.mark.filterwarnings("ignore:.*make one layer of them")
@pytest.mark.parametrize("form", MIXTURES)
def test_the_scheme_of_every_other_module_is_found(tmp_path: Path, form: str) -> None:
    original, mixed = tmp_path / "original", tmp_path / "mixed"
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    save_plain(original, tiny_model("llama", **sizes))
    save_tokenizer(original)
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that numbers are rounded.\n" * 9)
    first, *others = MIXTURES[form]
    recipe = Recipe(
        method="rtn", scheme=first, format=form,
        overrides=tuple(
            Override.parse(f"{linear}=scheme={name}")
            for linear, name in zip(LINEARS[1:], others, strict=False)
        ),
        calibration=str(text), samples=1, max_length=32,
    )  # fmt: skip
    quantize(original, mixed, recipe=recipe, device="cpu", progress=False)
    view = QuantizedCheckpoint.of(Checkpoint.open(mixed))
    assert view is not None
    tensors, right = load_file(mixed / "model.safetensors"), view.modules[DOWN]
    wrong = {spec.scheme: name for name, spec in view.modules.items() if spec.scheme != right.scheme}
    assert len(wrong) == len(others)
    rewrite(mixed, view.config.raw, tensors)
    assert passes(mixed, original)
    missed = []
    for scheme, name in wrong.items():
        specs = {**view.modules, DOWN: replace(right, scheme=scheme)}
        rewrite(mixed, write_quantization_config(view.format, specs, ("lm_head",)), tensors)
        if passes(mixed, original):
            missed.append(f"{DOWN} as {name}")
    assert not missed
