"""Draws the blocks of a report on a terminal with rich."""

from __future__ import annotations

from collections.abc import Iterable

import rich.table
from rich.console import Console
from rich.text import Text

from marlinq.core.display import GAP, Block, Facts, Lines, Table
from marlinq.core.safe_text import escaped

_STYLES = {
    **dict.fromkeys(("passed", "ok", "works", "yes", "verified"), "green"),
    **dict.fromkeys(("warning", "absent", "skipped"), "yellow"),
    **dict.fromkeys(("failed", "problem", "no"), "bold red"),
}
_LEAST_TEXT = 12
"""least width of a text column, in characters; a table that can't have it becomes a list"""


def draw(blocks: Iterable[Block], console: Console) -> None:
    """Prints the blocks with empty lines between them.

    Text wraps inside its column. A table that does not fit the terminal's width becomes a list of its rows,
    so that nothing is cut off.
    """
    for index, block in enumerate(blocks):
        if index:
            console.print()
        if isinstance(block, Lines):
            for line in block.lines:
                console.print(_styled(line, line.split(":")[0].lower()))
        elif isinstance(block, Facts):
            console.print(_facts(block.rows))
        else:
            _draw_table(block, console)


def _draw_table(table: Table, console: Console) -> None:
    if table.title:
        console.print(Text(escaped(table.title), "bold"))
    if _least_width(table) > console.width:
        for number, row in enumerate(table.rows):
            if number:
                console.print()
            labels = table.header or ("",) * len(row)
            console.print(_facts([(label, cell) for label, cell in zip(labels, row, strict=True) if cell]))
        return
    grid = _grid()
    grid.show_header = bool(table.header)
    columns = len(table.rows[0]) if table.rows else len(table.header)
    for index in range(columns):
        number = index in table.numbers or index == table.status
        title = Text(escaped(table.header[index])) if table.header else ""
        grid.add_column(
            title,
            justify="right" if index in table.numbers else "left",
            no_wrap=number,
            overflow="fold",
            header_style="bold",
        )
    for row in table.rows:
        grid.add_row(
            *(_styled(cell, cell if index == table.status else "") for index, cell in enumerate(row))
        )
    console.print(grid)


def _facts(rows: Iterable[tuple[str, str]]) -> rich.table.Table:
    grid = _grid()
    grid.show_header = False
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(escaped(label)), Text(escaped(text)))
    return grid


def _grid() -> rich.table.Table:
    return rich.table.Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0))


def _least_width(table: Table) -> int:
    rows = [table.header, *table.rows] if table.header else list(table.rows)
    width = 0
    for index, column in enumerate(zip(*rows, strict=True)):
        widest = max(len(escaped(cell)) for cell in column)
        fixed = index in table.numbers or index == table.status
        width += (widest if fixed else min(widest, _LEAST_TEXT)) + len(GAP)
    return width - len(GAP)


def _styled(text: str, word: str) -> Text:
    return Text(escaped(text), _STYLES.get(word, ""))
