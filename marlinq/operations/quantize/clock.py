"""Measures the time of each stage of a run from its progress reports."""

from __future__ import annotations

import time
from collections.abc import Callable

from marlinq.core.progress import ReportProgress

BLOCKS = "quantising blocks"
"""Name of the stage in which the run quantises one decoder block after the other."""


class StageClock:
    """A progress callback that measures time and passes every report on.

    Steps are reported when they are done, so the time since the last report belongs to the reported stage.
    A report of 0 steps begins a stage, and the time until then belongs to the stage before.

    Args:
        report: callback that gets every report.
        now: monotonic clock, in seconds.
    """

    def __init__(self, report: ReportProgress, now: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._now = now
        self._start = self._last = now()
        self._current = "preparing"
        self._seconds: dict[str, float] = {}
        self.blocks: list[float] = []
        """Seconds of each decoder block, in order."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        passed = self.mark(stage if done else self._current)
        if stage == BLOCKS and done:
            self.blocks.append(passed)
        self._current = stage
        self._report(stage, done, total)

    def mark(self, stage: str) -> float:
        """Adds the seconds since the last mark to those of ``stage``, and returns them."""
        now = self._now()
        passed, self._last = now - self._last, now
        self._seconds[stage] = self._seconds.get(stage, 0.0) + passed
        return passed

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """(stage, seconds) in the order in which stages began."""
        return tuple(self._seconds.items())

    @property
    def total(self) -> float:
        """Seconds from creation to the last mark."""
        return self._last - self._start
