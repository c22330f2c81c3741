"""The command line of this process, which an unfinished folder keeps to say how to continue it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_started: list[str] = []


@contextmanager
def remembered(arguments: Sequence[str]) -> Iterator[None]:
    """Inside, :func:`command_line` gives the command line with ``arguments``."""
    _started[:] = [shlex.join(["marlinq", *arguments])]
    try:
        yield
    finally:
        _started.clear()


def command_line() -> str | None:
    """The command line of this process; None where Python code called the operation."""
    return _started[0] if _started else None
