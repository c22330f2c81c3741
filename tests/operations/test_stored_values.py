"""Stored values that contradict the config get one answer, that of reading, from every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import marlinq
from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import CheckpointError
from marlinq.operations.convert import convert
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize import quantize
from marlinq.operations.rotate import rotate
from marlinq.operations.verify import verify
from marlinq.runtime import load
from tests.testing import faults
from tests.testing.original_folders import RECIPE, save_tiny
from tests.testing.runnable_folders import random_quantizer, save_quantized
from tests.testing.tiny_models import tiny_model

VICTIM = "model.layers.0.mlp.up_proj"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_stored_head_wins_over_a_config_that_ties_it(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    tokens = torch.tensor([[3, 4, 5]])
    expected = load(folder, device="cpu", dtype="float32").model(tokens).logits
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    logits = load(folder, device="cpu", dtype="float32").model(tokens).logits
    assert torch.equal(logits, expected)
    quantize(folder, tmp_path / "out", recipe=RECIPE.replace(method="rtn"), device="cpu")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    before, after = (Checkpoint.open(path).tensor("lm_head.weight") for path in (folder, tmp_path / "out"))
    assert torch.equal(before, after)
    rotate(folder, tmp_path / "rotated", device="cpu")
    turned = load(tmp_path / "rotated", device="cpu", dtype="float32").model(tokens).logits
    # Rotating rounds every weight once.
    assert float((turned - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("kind", ["v2 as v1", "v1 as v2", "v2 as v1, declared asymmetric", "awq, one up"])
def test_zero_points_of_another_format_are_refused_by_every_command(tmp_path: Path, kind: str) -> None:
    layout = {"v1 as v2": "gptq", "awq, one up": "awq"}.get(kind, "gptq-v2")
    folder = tmp_path / "model"
    save_quantized(folder, tiny_model("llama"), layout, random_quantizer())
    if layout == "awq":
        faults.change(folder, f"{VICTIM}.qzeros", faults.shift_zeros(1))
    else:
        edit_config(folder, checkpoint_format="gptq_v2" if layout == "gptq" else "gptq")
    if "asymmetric" in kind:
        edit_config(folder, sym=False)
    says = "zero points? decode"
    with pytest.raises(CheckpointError, match=says):
        load(folder, device="cpu")
    with pytest.raises(CheckpointError, match=says):
        convert(folder, tmp_path / "out", target_format="compressed-tensors")
    assert not (tmp_path / "out").exists()
    report = verify(folder)
    assert "readable" in {check.name for check in report.checks if check.status == "failed"}
    assert "zero point" in " ".join(inspect(folder).notes)
    marlinq.register()
    try:
        with pytest.raises(CheckpointError, match=says):
            AutoModelForCausalLM.from_pretrained(folder)
    finally:
        marlinq.unregister()
