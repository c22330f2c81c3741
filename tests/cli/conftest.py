"""Running the command line in this process, with operations that only record what they were asked."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from marlinq.cli import main
from marlinq.core.display import Block, lines

PACKAGE = Path(__file__).parents[2]
"""The folder that the package lies in."""


@dataclass
class Outcome:
    """Output and exit code of a command."""

    code: int
    out: str
    err: str


CHECKPOINTS = ("a", "folder", "model", "original")
"""Folders that commands find in the current one; only their config.json is ever looked at."""


@pytest.fixture
def marlinq(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Outcome]]:
    """A function that runs ``marlinq`` with the given arguments, where CHECKPOINTS are."""
    shown_by = warnings.showwarning
    for name in CHECKPOINTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        captured = capsys.readouterr()
        code = exit_info.value.code
        assert isinstance(code, int)
        return Outcome(code, captured.out, captured.err)

    yield run
    warnings.showwarning = shown_by


@dataclass
class Recorder:
    """Stands for an operation: keeps the arguments, then gives a report or raises."""

    error: BaseException | None = None
    ok: bool = True
    warnings: int = 0
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *arguments: Any, **options: Any) -> Recorder:
        self.arguments, self.options = arguments, options
        if self.error is not None:
            raise self.error
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"value": 1, "unbounded": float("inf")}

    def display(self) -> list[Block]:
        return [lines("one line of report")]

    def explain(self) -> list[Block]:
        return [lines("one reason")]


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    """A function that replaces ``module.name`` with a recorder, without importing the real module."""

    def replace(
        module: str, name: str, error: BaseException | None = None, *, ok: bool = True, warnings: int = 0
    ) -> Recorder:
        recorder = Recorder(error=error, ok=ok, warnings=warnings)
        stand_in = ModuleType(module)
        # Modules beside the operation, which commands import early, stay themselves.
        stand_in.__path__ = [str(PACKAGE / module.replace(".", "/"))]
        setattr(stand_in, name, recorder)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return recorder

    return replace
