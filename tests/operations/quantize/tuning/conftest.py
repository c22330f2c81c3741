"""Text that is the same in every run, and a recipe with which tuning begins at once."""

from __future__ import annotations

import json

import pytest
import torch

from marlinq.operations.quantize import own_text
from marlinq.operations.quantize.recipe import Recipe
from tests.operations.quantize.tuning.runs import TUNED


@pytest.fixture(autouse=True)
def same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """All text is drawn from all tokens, as text for tuning is, so that runs compare."""
    monkeypatch.setattr(own_text, "TOP_K", 0)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """As :data:`TUNED`, but tuning begins at once: weights are rounded, and the text is there."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = torch.randint(3, 128, (64, 40), generator=torch.Generator().manual_seed(1)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return TUNED.replace(method="rtn", calibration=str(path), tune_steps=6, tune_tokens=256)
