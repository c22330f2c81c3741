"""Quantise runs that are killed at a chosen step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marlinq.checkpoint import CheckpointWriter
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.recipe import Recipe


class Killed(BaseException):
    """Stands for the end of the process: nothing in the package catches it."""


def interrupted(source: Path, out: Path, recipe: Recipe, *, blocks: int = 1) -> None:
    """A run that is killed when ``blocks`` blocks are quantised."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "quantising blocks" and done >= blocks:
            raise Killed

    with pytest.raises(Killed):
        quantize(source, out, recipe=recipe, device="cpu", progress=stop)


def interrupt(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ends the run just before its ``step``-th write or commit."""

    def count(steps: int) -> None:
        if steps > step:
            raise Killed

    _call_before_steps(monkeypatch, count)


def steps_of(source: Path, out: Path, recipe: Recipe) -> int:
    """Writes and commits of an undisturbed run that is left in ``out``."""
    total = 0

    def count(steps: int) -> None:
        nonlocal total
        total = steps

    with pytest.MonkeyPatch.context() as patch:
        _call_before_steps(patch, count)
        quantize(source, out, recipe=recipe, device="cpu")
    return total


def _call_before_steps(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Calls ``before`` ahead of each write or commit, with its number from 1."""
    steps = 0

    def counted(original: Any) -> Any:
        def method(self: CheckpointWriter, *args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            before(steps)
            return original(self, *args, **kwargs)

        return method

    for name in ("write", "commit", "finish"):
        monkeypatch.setattr(CheckpointWriter, name, counted(getattr(CheckpointWriter, name)))
