"""Progress of an operation: the functions it reports to, and how they show it.

On a terminal progress is a bar that disappears when its stage ends; in a notebook it is tqdm's bar for
notebooks; elsewhere (a log, a pipe, CI) it is a line every 30 seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TextIO, TypeVar

from marlinq.core.devices import rank_and_size
from marlinq.core.display import duration
from marlinq.core.safe_text import encodable, one_line

ReportProgress = Callable[[str, int, int], None]
"""Function called with (name of the stage, steps done, steps in all)."""

Progress = ReportProgress | bool
"""``progress`` of an operation: True shows it on stderr, False shows none, a function is called."""

ReportMessage = Callable[[str], None]
"""Function called with a line of text: what comes next and how long it takes, or what was done."""

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

LINE_SECONDS = 30.0
"""Seconds between two lines of progress where there is no terminal."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


def no_message(line: str) -> None:
    """Shows nothing."""


def print_message(line: str) -> None:
    """Print one line on stderr, above the bar if there is one."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stderr):
        _print(line, sys.stderr)


@contextmanager
def showing(progress: Progress, *, stages: bool = False) -> Iterator[ReportProgress]:
    """The function that an operation reports to, as long as the ``with`` block lasts.

    Of several processes that ``torchrun`` started, the first one shows progress.

    Args:
        progress: True to show progress on stderr, False to show none, or the function to report to.
        stages: also print a line at the end of every stage, with the seconds it took.
    """
    if not isinstance(progress, bool):
        yield progress
    elif not progress or rank_and_size()[0] > 0:
        yield no_progress
    else:
        notebook = _notebook_bar()
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        shown = Bars(notebook) if notebook or on_terminal else ProgressLines(sys.stderr)
        with shown as report:
            yield StageSeconds(report) if stages else report


def shows_progress(operation: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate an operation so that callers may pass ``progress`` of type :data:`Progress`.

    The operation itself gets the function to report to. By default progress is shown.
    """

    @wraps(operation)
    def run(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        asked: Any = options.get("progress", True)
        with showing(asked) as report:
            options["progress"] = report
            return operation(*arguments, **options)

    return run


def messages_beside(progress: ReportProgress) -> ReportMessage:
    """A function that prints messages if ``progress``, from :func:`showing`, is shown on stderr; else drops
    them."""
    return print_message if isinstance(progress, (Bars, ProgressLines, StageSeconds)) else no_message


class Bars:
    """Draws a bar for the stage reported last, and removes it when the stage ends.

    Args:
        bar: a class with tqdm's interface; tqdm's own for terminals unless given.
    """

    def __init__(self, bar: type[Any] | None = None) -> None:
        if bar is None:
            from tqdm import tqdm

            bar = tqdm
        self._new_bar = bar
        self._bar: Any = None
        self._stage = ""

    def __enter__(self) -> ReportProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bar is None or stage != self._stage or done < self._bar.n:
            self._close()
            self._bar = self._new_bar(
                desc=one_line(stage), total=total, leave=False, dynamic_ncols=True, file=sys.stderr
            )
            self._stage = stage
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class ProgressLines:
    """Prints a line every 30 seconds, also while nothing is reported: stage, steps done, time left.

    Args:
        file: file that the lines are written to.
        interval: seconds between two lines.
        clock: seconds since some moment.
    """

    def __init__(
        self, file: TextIO, interval: float = LINE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._interval, self._clock = file, interval, clock
        self._start = clock()
        # stage -> (clock, steps done) at its first report, and when its last step was done
        self._begun: dict[str, tuple[float, int]] = {}
        self._last: dict[str, tuple[float, int]] = {}
        self._now: tuple[str, int, int] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="marlinq-progress", daemon=True)

    def __enter__(self) -> ReportProgress:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._begun or done < self._last[stage][1]:
            self._begun[stage] = self._last[stage] = self._clock(), done
        if done > self._last[stage][1]:
            self._last[stage] = self._clock(), done
        self._now = stage, done, total

    def line(self) -> str:
        """The line to print now."""
        clock = self._clock()
        so_far = f"[{duration(clock - self._start)}]"
        if self._now is None:
            return f"{so_far} starting"
        stage, done, total = self._now
        if done >= total:
            return f"{so_far} {stage}: done, the next step is running"
        text = f"{so_far} {stage}: {done} of {total}"
        begun, first = self._begun[stage]
        last, _ = self._last[stage]
        if done > first:
            # The step that is running counts once it takes longer than those before it.
            step = max((last - begun) / (done - first), (clock - begun) / (done - first + 1))
            left = max(step - (clock - last), 0) + step * (total - done - 1)
            text += f", about {duration(left)} left" if left else ""
        return text

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            _print(self.line(), self._file)


class StageSeconds:
    """Passes progress on, and prints a line for every stage that ends, with the seconds it took."""

    def __init__(self, report: ReportProgress, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._begun: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        begun = self._begun.setdefault(stage, self._clock())
        self._report(stage, done, total)
        if done >= total:
            del self._begun[stage]
            print_message(f"{stage}: {total} in {self._clock() - begun:.1f} s")


def _print(line: str, file: TextIO) -> None:
    print(encodable(one_line(line), file), file=file, flush=True)


def _notebook_bar() -> type[Any] | None:
    """tqdm's bar for notebooks, if this process runs a notebook with ipywidgets; else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:
        return None
    from tqdm import notebook

    # None without ipywidgets.
    return notebook.tqdm if vars(notebook)["IProgress"] is not None else None
