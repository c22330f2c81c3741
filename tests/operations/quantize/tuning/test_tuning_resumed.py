"""Tuning: its state is saved, and an interrupted run ends with the same bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from marlinq.checkpoint import CheckpointWriter
from marlinq.core.errors import OutputError
from marlinq.operations.quantize import gather_text, own_text, quantize
from marlinq.operations.quantize.quality import QUALITIES
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.tuning import loop, tuning_run
from tests.operations.quantize.tuning.runs import TUNED, dies, tuned
from tests.testing.interrupted import Killed
from tests.testing.original_folders import folder_bytes, save_tiny
from tests.testing.pairs import slow_but


def test_a_state_is_saved_where_that_takes_little_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe
) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    monkeypatch.setattr(tuning_run, "_SAVE_SECONDS", 0.0)
    saved: list[str] = []
    keep = tuning_run.keep

    def noted(writer: CheckpointWriter, name: str, *rest: Any) -> None:
        saved.append(name)
        keep(writer, name, *rest)

    monkeypatch.setattr(tuning_run, "keep", noted)
    for rate, share, expected in (
        (math.inf, 1.0, [tuning_run.STATE] * 3 + [tuning_run.RESULT]),
        (1e-9, 1.0, [tuning_run.RESULT]),
        (math.inf, 0.0, [tuning_run.RESULT]),
    ):
        monkeypatch.setattr(tuning_run, "_SAVE_RATE", rate)
        monkeypatch.setattr(tuning_run, "_SAVE_MEMORY_SHARE", share)
        saved.clear()
        tuned(source, tmp_path / f"{rate} {share}", rounded, samples=16, tune_steps=3)
        assert saved == expected


INTERRUPTED = TUNED.replace(samples=16, tune_codes=True, tune_steps=6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and what a run that nobody interrupts makes of it, saving its state as often as it can."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = save_tiny("llama", folder / "model", blocks=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_text, "TOP_K", 0)
        patch.setattr(tuning_run, "_SAVE_SECONDS", 0.0)
        patch.setattr(tuning_run, "_SAVE_RATE", math.inf)
        quantize(source, folder / "whole", recipe=INTERRUPTED, device="cpu")
    return source, folder / "whole"


@pytest.mark.parametrize(
    "moment",
    slow_but(
        ("between steps", "before the result", "between tensors", "before the end"),
        "between steps",
        "between tensors",
    ),
)
def test_an_interrupted_run_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: tuple[Path, Path], moment: str
) -> None:
    source, whole = undisturbed
    monkeypatch.setattr(tuning_run, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(tuning_run, "_SAVE_RATE", math.inf)
    recipe = INTERRUPTED
    seen: list[int] = []
    taken = loop.Loop._step

    def counted(self: loop.Loop) -> float:
        seen.append(self.now.step)
        if moment == "between steps" and len(seen) == 4:
            raise Killed
        return taken(self)

    def dies(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_step", counted)
        if moment == "before the result":
            patch.setattr(tuning_run.TuningRun, "_outcome", dies)
        if moment == "between tensors":
            write, done = CheckpointWriter.write, []

            def few(self: CheckpointWriter, name: str, tensor: torch.Tensor) -> None:
                done.append(name)
                # The third that is written a second time, and what is under way beside it.
                if len(done) - len(set(done)) >= 3:
                    raise Killed
                write(self, name, tensor)

            patch.setattr(CheckpointWriter, "write", few)
        if moment == "before the end":
            patch.setattr(CheckpointWriter, "finish", dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    assert not (tmp_path / "out").exists()
    seen.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_step", counted)
        moment = "undisturbed"
        quantize(source, tmp_path / "out", recipe=recipe, device="cpu", resume=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(whole)
    # Steps that were taken are not taken again.
    assert seen in ([3, 4, 5], [])


def test_a_damaged_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(tuning_run, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(tuning_run, "_SAVE_RATE", math.inf)

    def dies(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_run.TuningRun, "_outcome", dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=rounded.replace(tune_steps=2), device="cpu")
    state = tmp_path / "out.partial" / "tuning.safetensors"
    whole = state.read_bytes()
    one_bit = bytearray(whole)
    one_bit[-100] ^= 1
    for damaged in (whole[:-100], bytes(one_bit)):
        state.write_bytes(damaged)
        with pytest.raises(OutputError, match=r"tuning.safetensors: is damaged; remove"):
            quantize(
                source, tmp_path / "out", recipe=rounded.replace(tune_steps=2), device="cpu", resume=True
            )


def test_a_run_of_another_version_of_its_quality_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    recipe = TUNED.replace(quality="best", tune_steps=2)

    with pytest.MonkeyPatch.context() as patch:
        # Its folder is there before anything is made for it.
        patch.setattr(gather_text, "hold_out", dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    monkeypatch.setitem(QUALITIES, "best", replace(QUALITIES["best"], version=10**6))
    with pytest.raises(OutputError, match="belongs to a run with another recipe"):
        quantize(source, tmp_path / "out", recipe=recipe, device="cpu", resume=True)
