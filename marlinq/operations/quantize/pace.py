"""Whether something takes as long as was announced, and what is said when it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

from marlinq.core.display import duration
from marlinq.core.progress import ReportMessage, ReportProgress

_LEAST_SECONDS = 10.0
"""Seconds of work before it is judged: the first ones hold what is done once."""
_FACTOR = 1.5
"""How many times as long it may take as was last said."""


class Pace:
    """Passes progress on, and says a new time whenever the last one turns out much too short.

    Args:
        seconds: announced for the whole work.
        report: is told everything.
        message: gets the new times.
        clock: seconds since some moment.
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
