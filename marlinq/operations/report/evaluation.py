"""The figures of ``marlinq eval --keep``, stored beside a checkpoint in a file and in its model card.

The file is untrusted when it is read: only numbers and short lines are taken from it, and only if its
fingerprint is that of the checkpoint's manifest.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlinq.checkpoint import EVALUATION, MANIFEST
from marlinq.checkpoint.reader import read_json
from marlinq.core.errors import CheckpointError, OutputError
from marlinq.core.files import read_regular, replace_text
from marlinq.core.safe_text import one_line
from marlinq.core.version import __version__
from marlinq.operations.report.card import CARD, inline

_BEGIN, _END = "<!-- marlinq: evaluation -->", "<!-- marlinq: end of evaluation -->"
_SECTION = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END) + r"\n*", re.DOTALL)
_BEFORE = "\n## Use\n"
_REMEDY = "make the folder writable, or leave out --keep"
_MOST_TASKS = 400
_LONGEST = 200
_LARGEST = 1e30
_MAX_CARD_BYTES = 4 << 20


@dataclass(frozen=True)
class TaskFigures:
    """A metric of a task.

    Attributes:
        task, metric: names in lm-evaluation-harness.
        documents: number of documents answered.
        value, against: scores of the checkpoint and of the original.
        recovery, recovery_stderr: score in per cent of the original's, and its standard error.
    """

    task: str
    metric: str
    documents: float | None
    value: float | None
    against: float | None
    recovery: float | None
    recovery_stderr: float | None


@dataclass(frozen=True)
class EvaluationFigures:
    """A stored evaluation; values are None where they were not measured.
    Attributes:
        text: source of the text.
        tokens: number of predicted tokens.
        perplexity, against_perplexity: perplexity of the checkpoint and of the original.
        kl: mean KL divergence in nats.
        top1_agreement: share of positions (0 to 1) where both predict the same token.
        tasks: scores on tasks.
        recovery, recovery_stderr: mean over tasks of the score in per cent of the original's, and its
        standard
            error.
    """

    text: str
    tokens: float | None
    perplexity: float | None
    against_perplexity: float | None
    kl: float | None
    top1_agreement: float | None
    tasks: tuple[TaskFigures, ...]
    recovery: float | None
    recovery_stderr: float | None

    def measures(self) -> list[tuple[str, str]]:
        """(label, value) of each figure measured on text."""
        rows = []
        if self.kl is not None:
            rows.append(("mean KL divergence from the original, nats", f"{self.kl:.6f}"))
        if self.top1_agreement is not None:
            rows.append(("same most likely token as the original", f"{100 * self.top1_agreement:.2f} %"))
        if self.perplexity is not None:
            before = "" if self.against_perplexity is None else f" (original {self.against_perplexity:.4f})"
            rows.append(("perplexity", f"{self.perplexity:.4f}{before}"))
        on = "" if self.tokens is None else f", {self.tokens:.0f} tokens"
        return [*rows, ("text", self.text + on)] if rows else []

    def task_rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Cells of the columns :data:`TASK_COLUMNS` for each task."""
        rows = [
            (
                task.task,
                task.metric,
                "" if task.documents is None else f"{task.documents:.0f}",
                _decimal(task.value),
                _decimal(task.against),
                _recovery(task.recovery, task.recovery_stderr),
            )
            for task in self.tasks
        ]
        if self.recovery is not None:
            rows.append(("mean", "", "", "", "", _recovery(self.recovery, self.recovery_stderr)))
        return rows


TASK_COLUMNS = ("task", "metric", "documents", "score", "original", "recovery")


def read_evaluation(folder: Path, fingerprint: str) -> EvaluationFigures | None:
    """The stored evaluation of a checkpoint; None if there is none with this fingerprint."""
    if not (folder / EVALUATION).is_file():
        return None
    try:
        values = read_json(folder, EVALUATION)
    except CheckpointError:
        return None
    return _figures(values) if values.get("fingerprint") == fingerprint else None


def check_keepable(folder: Path) -> None:
    """Checks, before anything is measured, that an evaluation can be written into ``folder``.

    Raises:
        OutputError: the folder is there and can't be written.
    """
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: no file can be made there; {_REMEDY}")


def keep_evaluation(folder: Path, measured: Mapping[str, Any]) -> list[str]:
    """Writes an evaluation into a checkpoint's folder, and into its model card if marlinq wrote the card.

    Args:
        folder: folder of the checkpoint.
        measured: plain values of the evaluation.

    Returns:
        one line for each written file.

    Raises:
        OutputError: the folder can't be written.
    """
    plain = {"made_by": f"marlinq {__version__}", "fingerprint": _fingerprint(folder), **measured}
    figures = _figures(plain)
    notes = []
    try:
        replace_text(folder / EVALUATION, json.dumps(plain, indent=1) + "\n")
        notes.append(f"kept in {folder / EVALUATION}")
        card = _card(folder, figures)
        if card is not None:
            replace_text(folder / CARD, card)
            notes.append(f"and in {folder / CARD}")
    except OSError as error:
        raise OutputError(f"{error.filename or folder}: {error.strerror or error}; {_REMEDY}") from None
    return notes


def _fingerprint(folder: Path) -> str:
    try:
        fingerprint = read_json(folder, MANIFEST).get("fingerprint") if (folder / MANIFEST).is_file() else ""
    except CheckpointError:
        return ""
    return fingerprint if isinstance(fingerprint, str) else ""


def _card(folder: Path, figures: EvaluationFigures) -> str | None:
    """The model card with a section about the evaluation; None if marlinq wrote no card."""
    try:
        text = read_regular(folder / CARD, _MAX_CARD_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    section = "\n".join([_BEGIN, *_markdown(figures), _END]) + "\n\n"
    if _SECTION.search(text):
        return _SECTION.sub(lambda _: section, text, count=1)
    if "marlinq.json" not in text or _BEFORE not in text:
        return None
    return text.replace(_BEFORE, f"\n{section}{_BEFORE[1:]}", 1)


def _markdown(figures: EvaluationFigures) -> list[str]:
    lines = ["## Evaluation", ""]
    if measures := figures.measures():
        lines += ["| | |", "| --- | --- |", *(_row(row) for row in measures), ""]
    if rows := figures.task_rows():
        lines += [_row(TASK_COLUMNS), "|" + " --- |" * len(TASK_COLUMNS), *(_row(row) for row in rows), ""]
        lines += [
            "Recovery is the score in per cent of the original's ± its standard error over documents.",
            "",
        ]
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(inline(cell) for cell in cells) + " |"


def _figures(values: Mapping[str, Any]) -> EvaluationFigures:
    tasks = values.get("tasks")
    mean = _mapping(values.get("recovery"))
    return EvaluationFigures(
        text=_line(values.get("text")),
        tokens=_number(values.get("tokens")),
        perplexity=_number(values.get("perplexity")),
        against_perplexity=_number(values.get("against_perplexity")),
        kl=_number(values.get("kl")),
        top1_agreement=_number(values.get("top1_agreement")),
        tasks=tuple(_task(_mapping(one)) for one in tasks[:_MOST_TASKS])
        if isinstance(tasks, (list, tuple))
        else (),
        recovery=_number(mean.get("percent")),
        recovery_stderr=_number(mean.get("stderr")),
    )


def _task(values: Mapping[str, Any]) -> TaskFigures:
    ratio = _mapping(values.get("recovery"))
    return TaskFigures(
        task=_line(values.get("task")),
        metric=_line(values.get("metric")),
        documents=_number(values.get("documents")),
        value=_number(values.get("value")),
        against=_number(values.get("against_value")),
        recovery=_number(ratio.get("percent")),
        recovery_stderr=_number(ratio.get("stderr")),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value) if abs(value) <= _LARGEST else None


def _line(value: Any) -> str:
    return one_line(value)[:_LONGEST] if isinstance(value, str) else ""


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _recovery(percent: float | None, stderr: float | None) -> str:
    if percent is None:
        return ""
    return f"{percent:.1f} %" + ("" if stderr is None else f" ± {stderr:.1f}")
