"""The quick start's commands are commands, and what it says of them holds."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
import threading
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

    # They need more of their operations than is replaced below.
    import_module("marlinq.cli.quantize")
    task_options = import_module("marlinq.operations.evaluate").TaskOptions
    make(quickstart.MODEL)
    (tmp_path / "LICENSE").write_text("text")
    ran = []
    for step in quickstart.STEPS:
        name = step.arguments[0]
        if name == "generate":
            continue  # it calls two functions, and its options are tested elsewhere
        recorder = operation(*OPERATIONS[name])
        if name == "eval":
            sys.modules["marlinq.operations.evaluate"].TaskOptions = task_options
        outcome = marlinq(*step.arguments)
        assert (outcome.code, outcome.err) == (0, ""), step.arguments
        assert recorder.arguments
        ran.append(name)
        if step.makes is not None:
            make(step.makes)
    assert set(ran) == set(OPERATIONS)
    assert (Path(__file__).parents[2] / "LICENSE").stat().st_size > 8000  # 1024 tokens of text


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


def test_the_summary_tells_the_time_and_the_sizes(
    quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values: dict[str, object] = {"bytes_on_disk": 1e6, "model_bits": 6.5}
    answer = subprocess.CompletedProcess([], 0, json.dumps(values).encode(), b"")
    monkeypatch.setattr(quickstart.subprocess, "run", lambda *command, **settings: answer)
    quickstart.print_summary(100.0)
    lines = capsys.readouterr().out.splitlines()
    assert "Done in 1 min 40 s. What there is now:" in lines
    assert "quickstart/int4         1.0 MB              6.50   4-bit, compressed-tensors" in lines


def test_a_long_step_says_that_it_runs(quickstart: ModuleType) -> None:
    told = threading.Event()

    class Seen(io.StringIO):
        def write(self, text: str) -> int:
            told.set()
            return super().write(text)

    seen = Seen()
    with contextlib.redirect_stderr(seen), quickstart.still_running("step 2 of 7, quantize", every=0.001):
        assert told.wait(30)
    assert seen.getvalue().startswith("(step 2 of 7, quantize, has run for 0 s)")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s")]
)
def test_durations_are_in_minutes(quickstart: ModuleType, seconds: float, text: str) -> None:
    assert quickstart.minutes(seconds) == text


def test_a_failed_inspection_shows_its_message(
    quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    failed = subprocess.CompletedProcess([], 4, b"", b"error: why\n")
    monkeypatch.setattr(quickstart.subprocess, "run", lambda *command, **settings: failed)
    with pytest.raises(SystemExit) as exit_info:
        quickstart.facts(("inspect", "folder", "--json"))
    assert exit_info.value.code == 4
    sys.stderr.flush()
    assert b"error: why" in capfdbinary.readouterr().err
