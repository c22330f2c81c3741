"""Measured choices go before the model, on the GPU and for the problems that they were measured for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lab.kernels import tune
from marlinq.kernels import Device, Problem, batch_invariant, decide, dependent_launches
from marlinq.kernels.decide import decision, tuned
from marlinq.kernels.decide.decision import Demands, activates, estimates, model_choice
from marlinq.kernels.decide.device import H200

CELL = Problem(64, 4096, 4096, 128, zeros=False, bfloat16=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    caches = (tuned._choices, decision._decide)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()


def sweep(path: Path, problem: Problem, *, factor: float, hardware: str = "NVIDIA H200, CUDA 13.0") -> Path:
    """Model times but for the second best candidate, which takes ``factor`` times the best one's."""
    listed = sorted(estimates(problem, H200, "warpgroup"), key=lambda one: one[0])
    candidates = [
        {"kernel": "warpgroup", "config": asdict(config), "seconds": seconds}
        for seconds, _, config in listed[:4]
    ]
    candidates[1]["seconds"] = factor * listed[0][0]
    row = {"layer": "o", "n": problem.n, "k": problem.k, "m": problem.m, "candidates": candidates}
    row |= {"group_size": problem.group_size, "asymmetric": problem.zeros}
    path.write_text(json.dumps({"hardware": hardware, "rows": [row]}), encoding="utf-8")
    return path


def run_tune(monkeypatch: pytest.MonkeyPatch, folder: Path, *paths: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["tune.py", *map(str, paths), "--out", str(folder)])
    return tune.main()


def test_what_was_measured_faster_is_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = decide(CELL, H200)
    assert "bound by" in own.reason
    assert run_tune(monkeypatch, folder, sweep(folder / "sweep.json", CELL, factor=0.9)) == 0
    decision._decide.cache_clear()
    tuned._choices.cache_clear()
    found = decide(CELL, H200)
    assert (
        found.config == sorted(estimates(CELL, H200, "warpgroup"), key=lambda one: one[0])[1][2] != own.config
    )
    assert found.seconds == pytest.approx(0.9 * own.seconds)
    assert "measured on this GPU" in found.reason
    # Batches of the bucket, and nobody else.
    assert decide(replace(CELL, m=50), H200).config == found.config
    for other in (replace(CELL, m=65), replace(CELL, zeros=True), replace(CELL, n=4160)):
        assert "measured on" not in decide(other, H200).reason
    assert "measured on" not in decide(CELL, replace(H200, name="nvidia-h100")).reason
    assert "measured on" not in decide(CELL, Device("sm_90a", 132, 232_448)).reason
    for context in (batch_invariant, dependent_launches):
        with context():
            assert "measured on" not in decide(CELL, H200).reason


def test_small_gains_are_no_gains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_tune(monkeypatch, folder, sweep(folder / "sweep.json", CELL, factor=0.99)) == 0
    assert json.loads((folder / "nvidia-h200.json").read_text())["choices"] == []


def test_a_later_sweep_replaces_an_earlier_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sweep(folder / "first.json", CELL, factor=0.9)
    second = sweep(folder / "second.json", CELL, factor=0.8)
    other = sweep(folder / "other.json", replace(CELL, m=128), factor=0.9)
    no_bucket = sweep(folder / "none.json", replace(CELL, m=65), factor=0.9)
    assert run_tune(monkeypatch, folder, first, second, other, no_bucket) == 0
    written = json.loads((folder / "nvidia-h200.json").read_text())
    assert [row["m"] for row in written["choices"]] == [64, 128]
    # What was measured before stays; what the model is right about goes.
    right = sweep(folder / "right.json", CELL, factor=1.1)
    assert run_tune(monkeypatch, folder, right) == 0
    assert [row["m"] for row in json.loads((folder / "nvidia-h200.json").read_text())["choices"]] == [128]
    best = model_choice(CELL, H200, Demands())[0]
    assert written["choices"][0]["seconds"] == pytest.approx(0.8 * best)
    assert written["hardware"] == "NVIDIA H200, CUDA 13.0"


def test_sweeps_of_another_gpu_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = sweep(folder / "sweep.json", CELL, factor=0.9, hardware="NVIDIA L40S, CUDA 13.0")
    assert run_tune(monkeypatch, folder, given) == 1
    assert "nvidia-l40s" in capsys.readouterr().err


def test_a_file_that_does_not_fit_the_package_is_an_error(folder: Path) -> None:
    config = asdict(model_choice(CELL, H200, Demands())[2])
    row = {"n": 4096, "k": 4096, "m": 64, "group_size": 128, "zeros": False, "bfloat16": False}
    row |= {"format": "int4", "activation": None, "dependent": False}
    row |= {"kernel": "warpgroup", "seconds": 1e-5}
    for wrong, message in (({**config, "former": 1}, "former"), ({**config, "stages": 99}, "shared memory")):
        path = folder / "nvidia-h200.json"
        path.write_text(json.dumps({"gpu": "nvidia-h200", "choices": [{**row, "config": wrong}]}))
        tuned._choices.cache_clear()
        with pytest.raises(ValueError, match=message):
            decide(CELL, H200)


def test_what_was_measured_in_a_chain_holds_there_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = replace(CELL, m=4, n=8192, activation="silu")
    with dependent_launches():
        own = decide(cell, H200)
    listed = sorted(estimates(cell, H200, "stream"), key=lambda one: one[0])
    other = next(config for _, _, config in listed if config != own.config and activates(cell, config))
    for gain, noise, taken in ((1e-6, 1e-7, True), (1e-7, 1e-9, False), (1e-6, 3e-7, False)):
        candidates = [
            {"kernel": "stream", "config": asdict(config), "seconds": seconds, "standard_error": noise}
            for config, seconds in ((own.config, 5e-5), (other, 5e-5 - gain))
            if config is not None
        ]
        row = {"n": cell.n, "k": cell.k, "m": cell.m, "group_size": 128, "activation": "silu"}
        row |= {"dependent": True, "candidates": candidates}
        path = folder / "chain.json"
        path.write_text(json.dumps({"hardware": "NVIDIA H200", "rows": [row]}), encoding="utf-8")
        assert run_tune(monkeypatch, folder, path) == 0
        decision._decide.cache_clear()
        tuned._choices.cache_clear()
        with dependent_launches():
            found = decide(replace(cell, m=3), H200)
            assert (found.config == other) == taken == ("measured on" in found.reason)
            assert "measured on" not in decide(replace(cell, activation=None), H200).reason
            with batch_invariant():
                assert "measured on" not in decide(cell, H200).reason
        assert "measured on" not in decide(cell, H200).reason
