"""Prints reports, errors, warnings and progress for every command."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from io import TextIOWrapper
from typing import Any, Protocol, TextIO

import click

from marlinq.core import progress
from marlinq.core.display import Block, plain
from marlinq.core.errors import MarlinqError, OutputError
from marlinq.core.safe_text import encodable, json_text, one_line, prose

INTERRUPTED_CODE = 130
"""Exit code of a command that Ctrl-C ended."""
VERBOSITY = "marlinq.verbosity"
"""Key of click's ``Context.meta`` under which ``--quiet`` leaves -1 and ``--verbose`` 1."""


class Report(Protocol):
    """The result of an operation, for machines (JSON) and for people (text)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ...

    def display(self) -> Sequence[Block]:
        """Blocks of text and tables for people."""
        ...


class Explained(Report, Protocol):
    """A report with reasons, which text shows only with ``--explain`` and JSON always has."""

    def explain(self) -> Sequence[Block]:
        """Blocks with the reasons."""
        ...


def print_explained(report: Explained, *, as_json: bool, explain: bool) -> None:
    """Prints a report as :func:`print_report` does, followed by its reasons if ``explain``."""
    print_report(report, as_json=as_json, more=report.explain() if explain and not as_json else ())


def print_report(report: Report, *, as_json: bool, more: Sequence[Block] = ()) -> None:
    """Print a report on stdout: one JSON object, tables on a terminal, plain text elsewhere.

    Args:
        report: the report.
        as_json: print the JSON object.
        more: blocks to print after the report's own; not in JSON.
    """
    if as_json:
        print_json(_plain(report.to_dict()), indent=2)
    elif sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console

        from marlinq.cli.terminal import draw

        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        draw([*report.display(), *more], Console(markup=False, highlight=False, emoji=False))
    else:
        _print(plain([*report.display(), *more]))


def print_report_and_save(report: Report, save: Callable[[], None], *, as_json: bool) -> None:
    """Call ``save``, which writes another file of ``report``, then print ``report``, also if that file can't
    be written, since what was measured may have taken long. The command then ends with the error's exit code.
    The error goes to stderr even with ``as_json``, so that stdout holds one JSON object."""
    failed = None
    try:
        save()
    except OutputError as error:
        failed = error
    print_report(report, as_json=as_json)
    if failed is not None:
        print_line(f"error: {failed}")
        click.get_current_context().exit(failed.exit_code)


def print_json(value: dict[str, Any], *, indent: int | None = None) -> None:
    """Print one JSON object on stdout."""
    if sys.stdout is not None:
        _print(json_text(value, sys.stdout, indent=indent))


def print_piece(text: str) -> None:
    """Print a piece of text that a model wrote on stdout, without a line break."""
    _print(prose(text), end=False)


def _print(text: str, *, end: bool = True) -> None:
    """Print text on stdout, if that is open, with a line break at its ``end``."""
    if sys.stdout is None:
        return
    try:
        click.echo(encodable(text, sys.stdout), nl=end)
    except BrokenPipeError:
        # The reader wanted no more; click ends the command.
        raise
    except OSError as error:
        # What is still in the buffer would fail once more when Python ends.
        sys.stdout = None
        raise OutputError(f"stdout: {error.strerror or error}; the result was not printed whole") from None


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print one line on stderr, or into ``file``."""
    file = file or sys.stderr
    click.echo(encodable(one_line(text), file), file=file)


def print_message(line: str) -> None:
    """Print one line on stderr, above the bar if there is one; nothing with ``--quiet``."""
    if verbosity() >= 0:
        progress.print_message(line)


def print_error(error: MarlinqError, *, as_json: bool) -> int:
    """Print ``error`` as one line on stderr, or as a JSON object on stdout; returns its exit code."""
    message = str(error)
    if as_json and sys.stdout is not None:
        try:
            print_json({"error": message, "class": type(error).__name__, "exit_code": error.exit_code})
            return error.exit_code
        except OutputError as full:
            print_line(f"error: {full}")
    print_line(f"error: {message}")
    return error.exit_code


def verbosity() -> int:
    """-1 with ``--quiet``, 1 with ``--verbose``, else 0."""
    context = click.get_current_context(silent=True)
    return 0 if context is None else context.meta.get(VERBOSITY, 0)


def showing_progress() -> AbstractContextManager[progress.ReportProgress]:
    """A context that gives a progress callback (activity, steps done, steps in all) for stderr."""
    return progress.showing(verbosity() >= 0, stages=verbosity() > 0)


def show_warnings_briefly() -> None:
    """Print each warning as one line on stderr, without the source line that Python adds."""
    warnings.showwarning = _show_warning


def log_safely() -> None:
    """Makes every record of Python's logging one printable line, because libraries log untrusted configs."""
    logging.setLogRecordFactory(_Record)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802
        return one_line(super().getMessage())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print_line(f"warning: {message}", file)


def _plain(value: Any) -> Any:
    """``value`` with None for infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
