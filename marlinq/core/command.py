"""The command line of this process, which an unfinished folder keeps to say how to continue it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_started: list[str] = []


def remember_command(arguments: Sequence[str]) -> None:
    """Keeps the arguments that ``marlinq`` was started with."""
    _started[:] = [shlex.join(["marlinq", *arguments])]


def command_line() -> str | None:
    """The command line that was remembered; None where Python code called the operation."""
    return _started[0] if _started else None
