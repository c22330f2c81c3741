"""Families whose blocks exchange more than one residual stream, quantised with calibration and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import marlinq
from lab.models.families import families, random_model
from lab.models.shrink import TEXT_TOKENS
from marlinq.runtime.generation import generate


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4", "deepseek_v4", "glm5_next", "glm_moe_dsa"])
def test_quantised_with_calibration_it_is_verified_and_runs(model_type: str, tmp_path: Path) -> None:
    family = next(each for each in families() if each.model_type == model_type)
    random_model(family).save_pretrained(tmp_path / "model")
    rows = torch.randint(3, TEXT_TOKENS, (8, 48), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    text = {"calibration": (str(tmp_path / "rows.jsonl"),), "samples": 8, "max_length": 48}
    recipe = marlinq.Recipe(**text, group_size=32, expert_tokens=8)
    marlinq.quantize(tmp_path / "model", tmp_path / "out", recipe=recipe, device="cpu", progress=False)
    report = marlinq.verify(tmp_path / "out", against=tmp_path / "model", device="cpu", progress=False)
    assert not [check for check in report.checks if check.status == "failed"]
    loaded = marlinq.load(tmp_path / "out", device="cpu", dtype="float32", exact=True, progress=False)
    assert len(generate(loaded, rows[0][:8], max_new_tokens=4).tokens) == 4
