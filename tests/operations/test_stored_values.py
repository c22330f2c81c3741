"""Stored values that contradict the config get one answer, that of reading, from every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import marlinq
from marlinq.core.errors import CheckpointError
from marlinq.operations.convert import convert
from marlinq.operations.inspect import inspect
from marlinq.operations.verify import verify
from marlinq.runtime import load
from tests.testing import faults
from tests.testing.runnable_folders import random_quantizer, save_quantized
from tests.testing.tiny_models import tiny_model

VICTIM = "model.layers.0.mlp.up_proj"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


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
