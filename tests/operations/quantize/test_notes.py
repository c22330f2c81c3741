"""Notes of an interrupted run: taken up where they are ours, refused in one line where they are not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from marlinq.checkpoint import Checkpoint, CheckpointWriter, TensorPlan
from marlinq.core.errors import OutputError
from marlinq.core.progress import no_message, no_progress
from marlinq.methods.quantity import ErrorQuantity
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.journal_notes import check_notes, check_planned, module_reports
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.prepare import plan_run
from marlinq.operations.quantize.quantize_report import ModuleReport
from marlinq.operations.quantize.tuning import TuningReport
from tests.testing.original_folders import RECIPE, save_tiny

MODULE = asdict(
    ModuleReport("int4", 4, 32, True, None, "recipe", 100, 0.01, ErrorQuantity.OUTPUTS, None, {"damp": 0.01})
)
TUNING = TuningReport(2, 100, 10, 1, None, 0.5, 1, None, 0, 0.0, ("model.norm.weight",)).to_dict()
TEXT = {"source": "self", "documents": 2, "tokens": 30, "sha256": "0"}
NOTES = {"module a": MODULE, "tuning": TUNING, "calibration": TEXT, "other": [1]}


def resumed(folder: Path, notes: dict[str, Any]) -> CheckpointWriter:
    plan = [TensorPlan("a.weight", "float16", (2, 2))]
    with CheckpointWriter(folder / "out", plan, fingerprint="run") as writer:
        writer.commit(notes)
    return CheckpointWriter(folder / "out", plan, fingerprint="run", resume=True)


def test_our_own_notes_are_taken_up(tmp_path: Path) -> None:
    with resumed(tmp_path, NOTES) as writer:
        check_notes(writer.notes, writer.partial)
        assert module_reports(writer.notes) == {"a": ModuleReport(**MODULE)}


FORGED = {
    "no object": {"module a": 7},
    "a field too few": {"module a": {**{key: MODULE[key] for key in MODULE if key != "bits"}}},
    "a field too many": {"module a": {**MODULE, "extra": 1}},
    "text for a number": {"module a": {**MODULE, "relative_error": "small"}},
    "a number for text": {"module a": {**MODULE, "scheme": 4}},
    "true for a number": {"module a": {**MODULE, "tokens": True}},
    "a list for figures": {"module a": {**MODULE, "figures": [1]}},
    "tuning": {"tuning": {**TUNING, "kl_before": []}},
    "calibration without tokens": {"calibration": {"source": "self", "documents": 2}},
    "calibration": {"calibration": [TEXT]},
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_note_is_one_line(tmp_path: Path, kind: str) -> None:
    with resumed(tmp_path, FORGED[kind]) as writer, pytest.raises(OutputError, match="is damaged") as caught:
        check_notes(writer.notes, writer.partial)
    assert "\n" not in str(caught.value)


OTHERS = {
    "another group size": ("model.layers.0.mlp.up_proj", {"group_size": 64}),
    "another scheme": ("model.layers.0.mlp.up_proj", {"scheme": "int8, groups of 32, symmetric"}),
    "tokens without text": ("model.layers.0.mlp.up_proj", {"tokens": 5}),
    "another module": ("model.layers.7.mlp.up_proj", {}),
}


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], OutputPlan]:
    """Notes of a run of round-to-nearest, and its plan."""
    folder = tmp_path_factory.mktemp("notes")
    source = save_tiny("llama", folder / "model")
    recipe = RECIPE.replace(method="rtn")
    quantize(source, folder / "out", recipe=recipe, device="cpu")
    decisions = plan_run(
        Checkpoint.open(source),
        recipe,
        torch.device("cpu"),
        trust_remote_code=False,
        progress=no_progress,
        message=no_message,
    )
    return json.loads((folder / "out" / "marlinq.json").read_text())["run"], decisions.plan


@pytest.mark.parametrize("kind", OTHERS)
def test_a_note_about_something_else_is_refused(
    unfinished: tuple[dict[str, Any], OutputPlan], tmp_path: Path, kind: str
) -> None:
    notes, plan = unfinished
    check_planned(notes, plan, tmp_path)
    module, changes = OTHERS[kind]
    note = {**notes["module model.layers.0.mlp.up_proj"], **changes}
    with pytest.raises(OutputError, match=rf"the note 'module {module}' in its journal is not this run's"):
        check_planned({**notes, f"module {module}": note}, plan, tmp_path)
    with pytest.raises(OutputError, match="the note 'other'"):
        check_planned({**notes, "other": [1]}, plan, tmp_path)
