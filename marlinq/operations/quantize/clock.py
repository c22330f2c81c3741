"""Where the time of a run goes, told from the progress that it reports anyway."""

from __future__ import annotations

import time
from collections.abc import Callable

from marlinq.core.progress import ReportProgress

BLOCKS = "quantising blocks"
"""What the run reports while it goes from block to block."""


class StageClock:
    """A progress report that keeps time and passes everything on.

    Work is reported when it is done, so the time since the last report belongs to the stage that is reported
    now; where a stage only begins (no step is done yet), to what came before.

    Args:
        report: called with every report.
        now: seconds of a clock that never goes back.
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
        """Count the time since the last mark as that of ``stage``; returns it."""
        now = self._now()
        passed, self._last = now - self._last, now
        self._seconds[stage] = self._seconds.get(stage, 0.0) + passed
        return passed

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """Stages and their seconds, in the order in which they were first met."""
        return tuple(self._seconds.items())

    @property
    def total(self) -> float:
        """Seconds until the last mark."""
        return self._last - self._start
