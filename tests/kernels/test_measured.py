"""Measured choices go before the model, on the GPU and for the problems that they were measured for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lab.kernels import tune
from lab.kernels.step_variants import Rows, listed
from marlinq.kernels import Device, Problem, batch_invariant, decide, dependent_launches
from marlinq.kernels.choose import decision, measured
from marlinq.kernels.choose.decision import estimates, model_choice
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.demands import Demands
from marlinq.kernels.contract.device import H200
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.kernels.problems import int4_problem

CELL = int4_problem(64, 4096, 4096, 128, zeros=False, bfloat16=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    caches = (measured._choices, decision._decide)
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
    row |= {"group_size": problem.granularity.group_size, "asymmetric": problem.zeros}
    path.write_text(json.dumps({"hardware": hardware, "rows": [row]}), encoding="utf-8")
    return path


def run_tune(monkeypatch: pytest.MonkeyPatch, folder: Path, *paths: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["tune.py", *map(str, paths), "--out", str(folder)])
    return tune.main()


def test_a_configuration_measured_faster_is_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = decide(CELL, H200)
    assert "bound by" in own.reason
    assert run_tune(monkeypatch, folder, sweep(folder / "sweep.json", CELL, factor=0.9)) == 0
    decision._decide.cache_clear()
    measured._choices.cache_clear()
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
    # Earlier measurements stay; cells where the model is right are dropped.
    right = sweep(folder / "right.json", CELL, factor=1.1)
    assert run_tune(monkeypatch, folder, right) == 0
    assert [row["m"] for row in json.loads((folder / "nvidia-h200.json").read_text())["choices"]] == [128]
    best = model_choice(CELL, H200, Demands())[0]
    assert written["choices"][0]["seconds"] == pytest.approx(0.8 * best)
    assert written["hardware"] == "NVIDIA H200, CUDA 13.0"


def test_a_recorded_choice_stays_beside_one_that_is_hardly_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep(folder / "sweep.json", CELL, factor=0.9)
    content = json.loads(path.read_text())
    candidates = content["rows"][0]["candidates"]
    other = candidates[2]
    # Time of the recorded variant and of another, as shares of the time of the variant with least estimate;
    # True if the recorded variant stays, False if the other one replaces it, None if the record is dropped.
    for recorded, faster, kept in ((0.9, 0.89, True), (0.9, 0.8, False), (0.999, 0.99, None)):
        measured._choices.cache_clear()
        assert run_tune(monkeypatch, folder, sweep(folder / "first.json", CELL, factor=0.9)) == 0
        best = candidates[0]["seconds"]
        candidates[1]["seconds"], other["seconds"] = recorded * best, faster * best
        path.write_text(json.dumps(content))
        assert run_tune(monkeypatch, folder, path) == 0
        written = json.loads((folder / "nvidia-h200.json").read_text())["choices"]
        expected = {True: [candidates[1]["config"]], False: [other["config"]], None: []}[kept]
        assert [row["config"] for row in written] == expected
        (folder / "nvidia-h200.json").unlink()


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
        measured._choices.cache_clear()
        with pytest.raises(ValueError, match=message):
            decide(CELL, H200)


def test_choices_measured_in_a_chain_hold_there_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(CELL, m=4, n=8192, activation="silu")
    with dependent_launches():
        own = decide(cell, H200)
    listed = sorted(estimates(cell, H200, "stream"), key=lambda one: one[0])
    other = next(config for _, _, config in listed if config != own.config and config.activates(cell))
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
        measured._choices.cache_clear()
        with dependent_launches():
            found = decide(replace(cell, m=3), H200)
            assert (found.config == other) == taken == ("measured on" in found.reason)
            assert "measured on" not in decide(replace(cell, activation=None), H200).reason
            with batch_invariant():
                assert "measured on" not in decide(cell, H200).reason
        assert "measured on" not in decide(cell, H200).reason


def recorded() -> Iterator[tuple[Device, Problem, bool, Configuration]]:
    """Device, problem, whether among dependent launches, and variant of all that the package's files hold."""
    for path in sorted(measured.FOLDER.glob("*.json")):
        device = tune.DEVICES[path.stem]
        for (problem, dependent), choice in measured._choices(path.stem).items():
            yield device, problem, dependent, choice.config


def test_recorded_choices_suit_the_package() -> None:
    found = list(recorded())
    assert found
    for device, problem, dependent, config in found:
        with dependent_launches() if dependent else nullcontext():
            decided = decide(problem, device)
        assert decided.config == config
        assert "measured on" in decided.reason
        assert config.activates(problem), problem
        # A choice that the model makes anyway needs no record.
        assert config != model_choice(problem, device, Demands(dependent=dependent))[2], problem


def test_recorded_choices_of_a_chain_keep_norms_in_products() -> None:
    # In Llama-3-8B's and Qwen3-8B's layers the products from 4096 channels follow a norm, those to 4096 are
    # in front of one.
    hidden = 4096
    found = [(problem, config) for _, problem, dependent, config in recorded() if dependent]
    wide = [(problem, config) for problem, config in found if hidden in (problem.n, problem.k)]
    assert any(problem.n == hidden for problem, _ in wide)
    for problem, config in wide:
        if problem.k == hidden != problem.n:
            assert config.row_variant(problem, normed=True, adds=False), problem
        if problem.n == hidden and problem.k > hidden:
            assert config.row_variant(problem, normed=False, adds=True), problem


@pytest.mark.parametrize(
    ("problem", "work"),
    [
        (int4_problem(16, 28672, 4096, 128, False, False, activation="silu"), Rows(normed=True)),
        (int4_problem(16, 4096, 14336, 128, False, False), Rows(adds=True)),
        (int4_problem(1, 5120, 2048, 128, False, False), Rows()),
    ],
)
def test_a_chains_sweep_tries_configurations_of_the_same_work(problem: Problem, work: Rows) -> None:
    demanded = Demands(dependent=True)
    with dependent_launches():
        present = decide(problem, H200).config
        found = listed(problem, H200, demanded, 3, work)
    assert found[0] == present
    assert model_choice(problem, H200, demanded)[2] in found
    assert len(set(found)) == len(found) > 2
    for config in found:
        assert config.activates(problem)
        assert config.shared_bytes(problem) <= H200.shared_bytes
        if any(work):
            assert config.row_variant(problem, normed=work.normed, adds=work.adds)
        assert config.cluster <= 2
    kernels = {type(config) for config in found}
    assert (BulkConfig in kernels) == (not work.normed)
    assert (WarpgroupConfig in kernels) == (problem.m > 8)
    # One row: integer digits and products of several rows.
    assert {config.digits for config in found if isinstance(config, StreamConfig)} == (
        {True, False} if problem.m == 1 else set() if any(work) else {False}
    )
