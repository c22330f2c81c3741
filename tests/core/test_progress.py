"""Progress is a bar on a terminal, a line now and then elsewhere, and nothing where nobody asked."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from marlinq.core.display import duration
from marlinq.core.progress import (
    Bars,
    Progress,
    ProgressLines,
    ReportProgress,
    StageSeconds,
    messages_beside,
    no_message,
    no_progress,
    print_message,
    showing,
    shows_progress,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


on_each_screen = pytest.mark.parametrize("screen", [io.StringIO(), Terminal()], ids=["file", "terminal"])


def use(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.truncate(0)
    screen.seek(0)
    monkeypatch.setattr(sys, "stderr", screen)


def two_stages(progress: ReportProgress) -> None:
    progress("reading", 1, 2)
    progress("reading", 2, 2)
    progress("writing", 0, 3)
    progress("writing", 2, 3)


@on_each_screen
def test_bars_are_drawn_on_terminals_only(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    use(screen, monkeypatch)
    with showing(True) as progress:
        two_stages(progress)
    drawn = screen.getvalue()
    assert ("reading" in drawn, "writing" in drawn, "0/3" in drawn) == (isinstance(screen, Terminal),) * 3


def test_no_bar_stays_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with showing(True) as progress:
        two_stages(progress)
        # The message stands on a line of its own; of the bars nothing is left.
        print_message("between")
    screen.write("result")
    assert on_screen(screen.getvalue()) == ["between", "result"]


def on_screen(text: str) -> list[str]:
    """The lines that a terminal shows of ``text``: a carriage return goes back to a line's beginning."""
    shown = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown.append("".join(cells).rstrip())
    return [line for line in shown if line]


def test_a_line_says_what_how_far_and_how_long() -> None:
    clock = Clock()
    lines = ProgressLines(io.StringIO(), clock=clock)
    assert lines.line() == "[0.0 s] starting"
    clock.now += 20
    lines("reading", 0, 10)
    assert lines.line() == "[20 s] reading: 0 of 10"
    clock.now += 60
    lines("reading", 3, 10)
    assert lines.line() == "[1 min 20 s] reading: 3 of 10, about 2 min 20 s left"
    # A stage in between does not make the first one begin again.
    lines("copying", 1, 1)
    assert lines.line() == "[1 min 20 s] copying: done, the next step is running"
    clock.now += 20
    lines("reading", 4, 10)
    assert lines.line() == "[1 min 40 s] reading: 4 of 10, about 2 min 0 s left"
    # While a step runs, the time left goes down, until the step takes longer than those before it.
    clock.now += 10
    assert lines.line() == "[1 min 50 s] reading: 4 of 10, about 1 min 50 s left"
    lines("reading", 4, 10)
    clock.now += 10
    assert lines.line() == "[2 min 0 s] reading: 4 of 10, about 1 min 40 s left"
    clock.now += 30
    assert lines.line() == "[2 min 30 s] reading: 4 of 10, about 2 min 10 s left"
    lines("reading", 9, 10)
    clock.now += 60
    assert lines.line() == "[3 min 30 s] reading: 9 of 10"
    # Fewer steps than before are a new start.
    lines("reading", 1, 5)
    clock.now += 10
    lines("reading", 2, 5)
    assert lines.line() == "[3 min 40 s] reading: 2 of 5, about 30 s left"


def test_lines_come_by_themselves_and_end() -> None:
    written = threading.Event()

    class File(io.StringIO):
        def flush(self) -> None:
            written.set()

    file = File()
    with ProgressLines(file, interval=0.01) as progress:
        progress("reading\x1b[31m", 1, 4)
        written.clear()
        assert written.wait(60)
        assert written.clear() is None
        assert written.wait(60)
    assert "reading\\x1b[31m: 1 of 4\n" in file.getvalue()
    count = len(file.getvalue())
    assert not [thread for thread in threading.enumerate() if thread.name == "marlinq-progress"]
    assert len(file.getvalue()) == count


@on_each_screen
def test_progress_is_shown_only_if_asked_for(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    use(screen, monkeypatch)
    with showing(False) as progress:
        assert progress is no_progress
    own = lambda stage, done, total: None  # noqa: E731
    with showing(own) as progress:
        assert progress is own
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with showing(True) as progress:
        assert progress is no_progress
    assert screen.getvalue() == ""


@on_each_screen
def test_an_operation_shows_its_progress(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    use(screen, monkeypatch)

    @shows_progress
    def operation(given: int, *, progress: Progress = True) -> tuple[int, Any]:
        return given, progress

    def own(stage: str, done: int, total: int) -> None: ...

    for options in ({}, {"progress": True}):
        given, shown = operation(3, **options)
        assert given == 3
        assert isinstance(shown, Bars if isinstance(screen, Terminal) else ProgressLines)
        assert messages_beside(shown) is print_message
    assert operation(3, progress=False) == (3, no_progress)
    assert operation(3, progress=own) == (3, own)
    assert messages_beside(no_progress) is messages_beside(own) is no_message


@on_each_screen
def test_the_time_of_each_stage(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    use(screen, monkeypatch)
    clock, passed_on = Clock(), []
    report: Callable[..., None] = StageSeconds(lambda *given: passed_on.append(given), clock)
    report("reading", 0, 2)
    clock.now += 12.5
    report("writing", 1, 1)
    report("reading", 2, 2)
    assert screen.getvalue() == "writing: 1 in 0.0 s\nreading: 2 in 12.5 s\n"
    assert passed_on == [("reading", 0, 2), ("writing", 1, 1), ("reading", 2, 2)]


@on_each_screen
def test_a_notebook_gets_its_own_bar(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    use(screen, monkeypatch)
    from tqdm import notebook

    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    drawn = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.n = 0
            drawn.append(options["desc"])

        def update(self, steps: int) -> None:
            self.n += steps

        def close(self) -> None: ...

    monkeypatch.setattr(notebook, "tqdm", Bar)
    monkeypatch.setattr(notebook, "IProgress", object, raising=False)
    with showing(True) as progress:
        two_stages(progress)
    assert drawn == ["reading", "writing"]
    # Without ipywidgets there are lines, or a terminal's bar.
    monkeypatch.setattr(notebook, "IProgress", None)
    with showing(True) as progress:
        assert isinstance(progress, Bars if isinstance(screen, Terminal) else ProgressLines)
    assert drawn == ["reading", "writing"]


def test_durations() -> None:
    spoken = [duration(seconds) for seconds in (0, 9.94, 9.96, 59.4, 59.6, 190, 3599.7, 7500)]
    assert spoken == ["0.0 s", "9.9 s", "10 s", "59 s", "1 min 0 s", "3 min 10 s", "1 h 0 min", "2 h 5 min"]
