"""The quick start's commands are commands, and what it says of them holds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

OPERATIONS = {
    "quantize": ("marlinq.operations.quantize", "quantize"),
    "verify": ("marlinq.operations.verify", "verify"),
    "inspect": ("marlinq.operations.inspect", "inspect"),
    "convert": ("marlinq.operations.convert", "convert"),
    "eval": ("marlinq.operations.evaluate", "evaluate"),
    "bench": ("marlinq.operations.bench", "bench_decode"),
}


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "quickstart.py"
    specification = importlib.util.spec_from_file_location("quickstart", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "quickstart", module)
    specification.loader.exec_module(module)
    return module


def test_every_step_is_a_command(
    marlinq: Callable, operation: Callable, quickstart: ModuleType, tmp_path: Path
) -> None:
    def make(folder: Path) -> None:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")

    import_module("marlinq.cli.quantize")  # it needs the real recipe
    make(quickstart.MODEL)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text("text")
    ran = []
    for step in (*quickstart.STEPS, quickstart.Step("", quickstart.decode_command(quickstart.MARLIN))):
        name = step.arguments[0]
        if name == "generate":
            continue  # it calls two functions, and its options are tested elsewhere
        recorder = operation(*OPERATIONS[name])
        if name == "bench":
            sys.modules["marlinq.operations.bench"].Synthetic = object  # what the command imports beside it
        outcome = marlinq(*step.arguments)
        assert (outcome.code, outcome.err) == (0, ""), step.arguments
        assert recorder.arguments
        ran.append(name)
        if step.makes is not None:
            make(step.makes)
    assert set(ran) == set(OPERATIONS)
    assert (Path(__file__).parents[2] / "docs" / "guide.md").stat().st_size > 8000  # 2048 tokens of text


def test_a_finished_folder_is_not_made_again(
    quickstart: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    commands: list[list[str]] = []

    def ran(command: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(quickstart.subprocess, "run", ran)
    quantize, verify = quickstart.STEPS[:2]
    quickstart.run(quantize)
    quickstart.INT4.with_name(quickstart.INT4.name + ".partial").mkdir(parents=True)
    quickstart.run(quantize)
    quickstart.INT4.mkdir()
    quickstart.run(quantize)
    quickstart.run(verify)
    assert commands == [
        list(quantize.arguments),
        [*quantize.arguments, "--resume"],
        list(verify.arguments),
    ]
    assert "quickstart/int4 is there already" in capsys.readouterr().out


def test_a_failed_command_ends_the_tour(quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 7)
    monkeypatch.setattr(quickstart.subprocess, "run", lambda *command, **settings: failed)
    with pytest.raises(SystemExit) as exit_info:
        quickstart.run(quickstart.STEPS[1])
    assert exit_info.value.code == 7


def test_the_last_line_compares_the_speeds(
    quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = iter((15.0, 45.0, 20.0, 30.0))
    measured = []

    def ran(command: list[str], **settings: object) -> subprocess.CompletedProcess[bytes]:
        values: dict[str, object] = {"bytes_on_disk": 1e6, "model_bits": 6.5}
        if "bench" in command:
            measured.append(Path(command[5]))
            values = {"cells": [{"tokens_per_second": next(speeds)}], "hardware": "a CPU"}
        return subprocess.CompletedProcess(command, 0, json.dumps(values).encode(), b"")

    monkeypatch.setattr(quickstart.subprocess, "run", ran)
    found = quickstart.fastest_in_turn(quickstart.MODEL, quickstart.MARLIN)
    assert measured == 2 * [quickstart.MODEL, quickstart.MARLIN]
    assert "45.0 tokens/s: a CPU" in capsys.readouterr().out
    quickstart.print_summary(100.0, found)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Decoding here: 20.0 tokens/s the original, 45.0 tokens/s in 4 bits, 2.25 times as fast."


def test_a_failed_measurement_shows_its_message(
    quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    failed = subprocess.CompletedProcess([], 4, b"", b"error: why\n")
    monkeypatch.setattr(quickstart.subprocess, "run", lambda *command, **settings: failed)
    with pytest.raises(SystemExit) as exit_info:
        quickstart.tokens_per_second(quickstart.MODEL)
    assert exit_info.value.code == 4
    sys.stderr.flush()
    assert b"error: why" in capfdbinary.readouterr().err
