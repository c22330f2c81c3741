"""Blocks that a report consists of (lines, labelled facts, tables), and their plain text.

Pipes and Python callers get plain text; on a terminal the command line draws the same blocks with rich.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from marlinq.core.safe_text import escaped

GAP = "  "
"""Text between two columns of plain text."""


@dataclass(frozen=True)
class Lines:
    """Lines of text, shown unchanged."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Rows of a label and its value."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        header: titles of the columns; empty for none.
        rows: rows, each with as many cells as there are columns.
        numbers: indices of columns that are aligned to the right.
        status: index of the column with words such as ``passed`` or ``no``, which a terminal colours; or
            None.
        title: line above the table; empty for none.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    status: int | None = None
    title: str = ""


Block = Lines | Facts | Table


class Shown(ABC):
    """A report that is shown as blocks."""

    @abstractmethod
    def display(self) -> Sequence[Block]:
        """The blocks of the report, from top to bottom."""

    def render(self) -> str:
        """The report as plain text, without a final newline."""
        return plain(self.display())

    def __str__(self) -> str:
        return self.render()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the text in a notebook, where IPython would fill pages with the report's fields."""
        printer.text(self.render())


def lines(*texts: str) -> Lines:
    """A block of lines."""
    return Lines(texts)


def counted(number: object, nouns: str) -> str:
    """A number with its noun, given in the plural with an s: "1 token", "2 tokens"."""
    return f"{number} {nouns.removesuffix('s') if number == 1 else nouns}"


def size_text(count: float) -> str:
    """A number of bytes as text: ``1.23 GB`` or ``45.60 MB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def duration(seconds: float) -> str:
    """Seconds as text: ``3.2 s``, ``45 s``, ``3 min 10 s`` or ``2 h 5 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plain(blocks: Iterable[Block]) -> str:
    """The blocks as text, an empty line between two of them; columns as wide as their widest cell."""
    return "\n\n".join(text for block in blocks if (text := _plain(block)))


def _plain(block: Block) -> str:
    if isinstance(block, Lines):
        return "\n".join(escaped(line) for line in block.lines)
    if isinstance(block, Facts):
        return _columns([(label, text) for label, text in block.rows], ())
    body = [block.header, *block.rows] if block.header else list(block.rows)
    text = _columns(body, block.numbers)
    return f"{escaped(block.title)}\n{text}" if block.title else text


def _columns(rows: Sequence[tuple[str, ...]], numbers: Sequence[int]) -> str:
    shown = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*shown, strict=True)]
    return "\n".join(
        GAP.join(
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    )
