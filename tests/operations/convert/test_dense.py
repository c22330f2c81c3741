"""Dequantised checkpoints, and quantised ones as sources of ``quantize``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.operations.convert import convert
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.foreign_floats import config_of, rewrite
from tests.testing.runnable_folders import save_plain
from tests.testing.tiny_models import tiny_model

DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


def made(folder: Path, scheme: str) -> Path:
    """A bfloat16 model of one block, quantised."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1).bfloat16()
    original = save_plain(folder / "original", model)
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    recipe = Recipe(method="rtn", scheme=scheme, format="compressed-tensors")
    quantize(original, folder / scheme, recipe=recipe, device="cpu", progress=False)
    return folder / scheme


def view(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


def test_weights_that_bfloat16_rounds_need_allow_loss(tmp_path: Path) -> None:
    source = made(tmp_path, "fp8")
    with pytest.raises(ConversionRefused, match="bfloat16 rounds its dequantised weights; --allow-loss"):
        convert(source, tmp_path / "dense", target_format="dense", progress=False)
    assert not (tmp_path / "dense").exists()
    report = convert(source, tmp_path / "dense", target_format="dense", allow_loss=True, progress=False)
    assert report.lossy
    weight = Checkpoint.open(tmp_path / "dense").tensor(f"{DOWN}.weight")
    assert torch.equal(weight, view(source).load(DOWN).dequantize(torch.bfloat16))


def test_powers_of_two_are_exact_in_bfloat16(tmp_path: Path) -> None:
    source = made(tmp_path, "mxfp4")
    with pytest.raises(ConversionRefused, match="add --scheme nvfp4, which modelopt holds"):
        convert(source, tmp_path / "modelopt", target_format="modelopt", progress=False)
    report = convert(source, tmp_path / "dense", target_format="dense", progress=False)
    assert not report.lossy
    weight = Checkpoint.open(tmp_path / "dense").tensor(f"{DOWN}.weight")
    assert torch.equal(weight.float(), view(source).load(DOWN).dequantize())


def test_a_quantised_source_is_quantised_anew(tmp_path: Path) -> None:
    source = made(tmp_path, "fp8")
    recipe = Recipe(method="rtn", scheme="int8", format="gptq", overrides=(Override.parse("down_proj=skip"),))
    with pytest.warns(UserWarning, match="is quantised already; its weights are dequantised"):
        quantize(source, tmp_path / "anew", recipe=recipe, device="cpu", progress=False)
    before, after = view(source), view(tmp_path / "anew")
    # A module kept unquantised has the dequantised weight; a quantised one is near it.
    kept = after.checkpoint.tensor(f"{DOWN}.weight")
    assert torch.equal(kept, before.load(DOWN).dequantize(torch.bfloat16))
    wide = before.load(UP).dequantize(torch.bfloat16).float()
    error = (after.load(UP).dequantize() - wide).abs().max()
    # Half a step of the widest group, and its float16 scale, off by up to 2**-11.
    assert float(error) <= float(wide.abs().max()) * (1 / 255 + 2**-11)


def test_weights_that_are_not_finite_are_named_before_they_are_rounded(tmp_path: Path) -> None:
    folder = made(tmp_path, "fp8")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.weight"].view(torch.uint8)[3, 5] = 0x7F
    rewrite(folder, config_of(folder), tensors)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(str(folder))}: {UP}: 1 of \d+ codes stand for NaN"
    ):
        convert(
            folder, tmp_path / "out", target_format="compressed-tensors", scheme="fp8-block",
            allow_loss=True, progress=False,
        )  # fmt: skip
    assert not list(tmp_path.glob("out*"))
