"""The report operation: reads a checkpoint's figures and writes three files."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marlinq.checkpoint import Checkpoint
from marlinq.core.display import Block, Facts, Shown, Table, counted
from marlinq.core.errors import OutputError, UsageError
from marlinq.core.files import read_regular, replace_text
from marlinq.core.model_source import local_folder
from marlinq.core.progress import Progress, no_progress, shows_progress
from marlinq.operations.report.figures import CheckpointFigures, TimeFigures
from marlinq.operations.report.page import GENERATOR, duration, page, percent, size
from marlinq.operations.report.reading import REPORT_JSON, read_figures
from marlinq.operations.report.tables import COLUMNS, MADE_BY, csv_text, json_text, json_value

HTML, CSV = "report.html", "report.csv"
_SHOWN = 8
# The beginning of each file, which tells marlinq's reports from other programs' files.
_MARKS = {
    HTML: f'name="generator" content="{GENERATOR}',
    CSV: ",".join(COLUMNS),
    REPORT_JSON: f'{{"made_by": "{MADE_BY}',
}
_MARK_BYTES = 4096


@dataclass(frozen=True)
class WrittenReport(Shown):
    """The written files and the figures in them.
    Attributes:
        files: paths of the page, the table and the JSON file.
        checkpoints: figures of one checkpoint, or of two side by side.
    """

    files: tuple[Path, ...]
    checkpoints: tuple[CheckpointFigures, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"files": [str(path) for path in self.files], **json_value(self.checkpoints)}

    def display(self) -> list[Block]:
        """The files, and the main figures."""
        rows = [
            ("made", str(self.files[0])),
            ("", f"{self.files[1].name} and {self.files[2].name} beside it"),
        ]
        blocks: list[Block] = [Facts(tuple(rows))]
        for figures in self.checkpoints:
            blocks_counted = counted(len(figures.blocks), "blocks")
            facts = [
                ("checkpoint", figures.name),
                (
                    "quantised",
                    f"{counted(len(figures.modules), 'linears')} in {blocks_counted}, {figures.format}",
                ),
                ("size", f"{size(figures.nbytes)}, {figures.bits_per_weight:.2f} bits per weight"),
            ]
            if figures.errors:
                largest = f"{percent(figures.errors[-1])} in {figures.worst[0].name}"
                facts.append(
                    (figures.error_label, f"median {percent(figures.median_error)}, largest {largest}")
                )
            if figures.time:
                facts.append(("time", f"{duration(figures.time.total)} on {figures.time.device}"))
            facts += [("note", note) for note in figures.notes]
            blocks.append(Facts(tuple(facts)))
        if len(self.checkpoints) == 1 and self.checkpoints[0].errors:
            blocks.append(_worst_table(self.checkpoints[0]))
        return blocks


def _worst_table(figures: CheckpointFigures) -> Table:
    rows = tuple((module.name, percent(module.error)) for module in figures.worst[:_SHOWN])
    return Table(("module (worst first)", figures.error_label), rows, numbers=(1,))


@shows_progress
def report(
    checkpoint: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] = ".",
    revision: str | None = None,
    progress: Progress = True,
) -> WrittenReport:
    """Writes ``report.html``, ``report.csv`` and ``report.json`` about one quantised checkpoint, or two.

    Figures of the run that made a checkpoint come from its manifest and from the report in its folder; codes
    and scales are counted in the tensors. Neither torch nor a GPU is needed.

    Args:
        checkpoint: folder or Hub id.
        other: second checkpoint, to compare with the first.
        out: folder to write into, made if it does not exist; an older report there is replaced.
        revision: branch, tag or commit of Hub ids; the main branch when None.
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).

    Raises:
        CheckpointError: a folder is damaged or contradicts itself.
        UnsupportedError: a checkpoint is not quantised, or in a way that marlinq does not read.
        OutputError: another program's file has a report's name, or ``out`` can't be written.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    sources = [checkpoint] if other is None else [checkpoint, other]
    if other is not None and _same(checkpoint, other):
        raise UsageError(f"{os.fspath(other)}: named twice; name two checkpoints, or one alone")
    folder = Path(out)
    _check_place(folder)
    figures = []
    for source in sources:
        opened = Checkpoint.open(source, revision=revision, progress=progress)
        figures.append(read_figures(opened, _name(source), progress))
        opened.check_unchanged()
    return _write(folder, figures)


def write_report(folder: Path, time: TimeFigures) -> WrittenReport:
    """Writes the report of a checkpoint that was just made into its folder.

    Args:
        folder: folder of the checkpoint.
        time: times of the run.

    Raises:
        MarlinqError: any error of :func:`report`.
    """
    figures = read_figures(Checkpoint.open(folder), folder.absolute().name, no_progress)
    return _write(folder, [replace(figures, time=time)])


def _write(folder: Path, figures: Sequence[CheckpointFigures]) -> WrittenReport:
    _check_place(folder)
    texts = {HTML: page(figures), CSV: csv_text(figures), REPORT_JSON: json_text(figures)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_text(folder / name, text)
    except OSError as error:
        raise OutputError(
            f"{error.filename or folder}: {error.strerror or error}; choose another folder with --out"
        ) from None
    return WrittenReport(tuple(folder / name for name in texts), tuple(figures))


def _check_place(folder: Path) -> None:
    """Checks that ``folder`` can be made and that no file of another program would be replaced.

    Raises:
        OutputError: it can't, or a file would be.
    """
    try:
        in_the_way = not stat.S_ISDIR(folder.stat().st_mode)
    except FileNotFoundError:
        # lexists also finds a broken link.
        in_the_way = os.path.lexists(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"{str(folder)[:200]!r}: can't be created ({reason}); choose another folder with --out"
        ) from None
    if in_the_way:
        raise OutputError(f"{folder}: is not a folder; choose another with --out")
    for name, mark in _MARKS.items():
        path = folder / name
        if not os.path.lexists(path):
            continue
        try:
            start = read_regular(path, 1 << 30)[:_MARK_BYTES]
        except (OSError, ValueError):
            start = b""
        if mark.encode() not in start:
            raise OutputError(
                f"{path}: is no report of marlinq's; move it away or choose another folder with --out"
            )


def _name(source: str | os.PathLike[str]) -> str:
    """A folder's own name, or the Hub id."""
    folder = local_folder(source)
    return os.fspath(source) if folder is None else folder.absolute().name


def _same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
