"""Corrects an announced time while the work takes much longer."""

from __future__ import annotations

import time
from collections.abc import Callable

from marlinq.core.display import duration
from marlinq.core.progress import ReportMessage, ReportProgress

_LEAST_SECONDS = 10.0
"""seconds before the pace is judged, because the first steps include one-time work"""
_FACTOR = 1.5
"""ratio of expected to announced time above which a new time is announced"""


class Pace:
    """A progress callback that announces a new time when the last one turns out far too short.

    Args:
        seconds: announced seconds for the whole work.
        report: progress callback that gets every report unchanged.
        message: callback that gets the lines with new times.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        seconds: float,
        report: ReportProgress,
        message: ReportMessage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._said, self._report, self._message, self._clock = max(seconds, 1.0), report, message, clock
        self._begun = clock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._report(stage, done, total)
        passed = self._clock() - self._begun
        if not 0 < done < total or passed < _LEAST_SECONDS:
            return
        whole = passed * total / done
        if whole > _FACTOR * self._said:
            left = duration(whole - passed)
            self._message(
                f"{stage}: {done} of {total} in {duration(passed)}, slower than expected; about {left} left"
            )
            self._said = whole
