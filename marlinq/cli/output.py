"""What every command prints alike: reports, errors, warnings and progress."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

import click
from tqdm import tqdm

from marlinq.core.errors import MarlinqError


class Report(Protocol):
    """What an operation returns: one value that machines and people can both read."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ...

    def render(self) -> str:
        """Text for a terminal, without a final newline."""
        ...


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a report on stdout: one JSON object, or text."""
    if as_json:
        click.echo(json.dumps(_plain(report.to_dict()), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(report.render())


def print_error(error: MarlinqError, *, as_json: bool) -> int:
    """Print ``error`` as one line on stderr, or as a JSON object on stdout; returns its exit code."""
    message = " ".join(str(error).split())
    if as_json:
        value = {"error": message, "class": type(error).__name__, "exit_code": error.exit_code}
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(f"error: {message}", err=True)
    return error.exit_code


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A function of (what is being done, steps done, steps in all) that draws a bar on stderr.

    Another thing being done, or fewer steps than before, ends one bar and starts the next. Nothing is drawn
    where stderr is not a terminal.
    """
    bar: tqdm[Any] | None = None
    current = ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal bar, current
        if bar is None or stage != current or done < bar.n:
            if bar is not None:
                bar.close()
            bar, current = tqdm(desc=stage, total=total, disable=None, file=sys.stderr), stage
        bar.total = total
        bar.update(done - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()


def show_warnings_briefly() -> None:
    """Print each warning as one line on stderr, without the source line that Python adds."""
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    click.echo(f"warning: {' '.join(str(message).split())}", file=file or sys.stderr)


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN; both become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
