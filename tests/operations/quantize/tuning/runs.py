"""Runs of a tiny model that tune, or stop where tuning begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import marlinq
from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.weight import QuantizedWeight
from marlinq.operations.quantize import quantize, solve
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.interrupted import Killed
from tests.testing.original_folders import RECIPE

# With this seed tuning gains most on held-out text of the toy; with others chance decides.
TUNED = RECIPE.replace(samples=64, tune_steps=12, tune_tokens=512, tune_rate=0.002, seed=1)


def dies(*args: Any, **kwargs: Any) -> Any:
    raise Killed


def tuned(source: Path, out: Path, recipe: Recipe = TUNED, **changes: Any) -> dict[str, Any]:
    """Quantises and returns the report that the manifest holds."""
    quantize(source, out, recipe=recipe.replace(**changes), device="cpu")
    report: dict[str, Any] = json.loads((out / "marlinq.json").read_text())["run"]["tuning"]
    return report


def untuned(source: Path, out: Path, recipe: Recipe = TUNED, **changes: Any) -> dict[str, QuantizedWeight]:
    """The weights that tuning begins with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "tune", lambda *args, **options: None)
        quantize(source, out, recipe=recipe.replace(**changes), device="cpu")
    return weights(out)


def begun(source: Path, *outs: Path, **changes: Any) -> Recipe:
    """Runs that have quantised all blocks and tuned nothing yet, each to be resumed; returns their recipe."""
    recipe = TUNED.replace(**changes)
    first, *others = (out.with_name(out.name + ".partial") for out in outs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "tune", dies)
        with pytest.raises(Killed):
            quantize(source, outs[0], recipe=recipe, device="cpu")
    for other in others:
        shutil.copytree(first, other)
    return recipe


def weights(folder: Path) -> dict[str, QuantizedWeight]:
    quantized = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert quantized is not None
    return {name: quantized.load(name) for name in quantized.modules}


def kept(folder: Path) -> dict[str, torch.Tensor]:
    quantized = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert quantized is not None
    return {name: quantized.checkpoint.tensor(name) for name in quantized.passthrough}


def kl(folder: Path, source: Path) -> float:
    found = marlinq.evaluate(folder, against=source, windows=48, length=40, device="cpu", dtype="float32").kl
    assert found is not None
    return found


def nine_documents(path: Path) -> Path:
    """A file of nine documents of 40 tokens each."""
    rows = torch.randint(3, 120, (9, 40), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path
