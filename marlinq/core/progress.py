"""How an operation reports its progress to whoever called it."""

from __future__ import annotations

from collections.abc import Callable

ReportProgress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

ReportMessage = Callable[[str], None]
"""Called with a line for people: what comes next and how long it takes, or how it goes."""


def no_progress(stage: str, done: int, total: int) -> None:
    """The report of a caller who did not ask for any."""


def no_message(line: str) -> None:
    """The messages of a caller who did not ask for any."""
