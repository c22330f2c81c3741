"""Reports as tables on terminals, as plain text elsewhere, and harmless wherever their words come from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console

from marlinq.cli import output
from marlinq.cli.terminal import draw
from marlinq.core.display import Block, Facts, Lines, Table, plain
from marlinq.core.safe_text import escaped

HOSTILE = "layer\x1b[31m\nverified\u202e\udc80\x9b"
CHECKS = Table(
    ("status", "check", "detail"),
    (("passed", "files", "482 tensors in 1 file"), ("failed", "scales", "a long detail " * 6)),
    status=0,
)
FIGURES = Table(("layer", "M", "time"), (("a", "1", "10.25"), ("much-longer", "128", "7.00")), numbers=(1, 2))
BLOCKS: list[Block] = [Lines(("title",)), Facts((("size", "113.1 MB"), ("note", HOSTILE))), CHECKS, FIGURES]


def drawn(blocks: list[Block], width: int, *, terminal: bool = True) -> str:
    screen = io.StringIO()
    draw(blocks, Console(file=screen, force_terminal=terminal, width=width, color_system="standard"))
    return screen.getvalue()


def unstyled(blocks: list[Block], width: int) -> str:
    screen = io.StringIO()
    draw(blocks, Console(file=screen, width=width, color_system=None))
    return screen.getvalue()


def test_plain_text_has_aligned_columns_and_no_escapes() -> None:
    text = plain(BLOCKS)
    assert "\x1b" not in text
    assert "layer          M   time\na              1  10.25\nmuch-longer  128   7.00" in text
    assert "passed  files   482 tensors in 1 file" in text


def test_no_text_of_a_file_can_fake_a_line_or_control_the_terminal() -> None:
    assert escaped(HOSTILE) == "layer\\x1b[31m\\nverified\\u202e\\udc80\\x9b"
    for text in (plain(BLOCKS), unstyled(BLOCKS, 200)):
        text.encode()
        assert HOSTILE not in text
        assert not {"\x1b", "\u202e", "\x9b"} & set(text)
        assert not any(line.startswith("verified") for line in text.splitlines())


def test_status_words_are_coloured_on_a_terminal() -> None:
    text = drawn([CHECKS], 100)
    assert "\x1b[32mpassed" in text
    assert "\x1b[1;31mfailed" in text


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_nothing_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    text = unstyled(BLOCKS, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("long") == 6 + 1  # the detail's six, and the name of a layer
    for word in ("482", "tensors", "10.25", "7.00", "128", "113.1"):
        assert word in text


def test_a_table_of_numbers_that_do_not_fit_becomes_a_list() -> None:
    header = ("layer", *(f"column {index}" for index in range(8)))
    row = ("a", *(f"{index}.12345" for index in range(8)))
    wide = Table(header, (row, row), numbers=tuple(range(1, 9)))
    assert len(unstyled([wide], 120).splitlines()) == 3
    lines = unstyled([wide], 60).splitlines()
    assert [line.split() for line in lines[1:3]] == [["column", "0", "0.12345"], ["column", "1", "1.12345"]]
    assert len(lines) == 2 * 9 + 1


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Report:
    def to_dict(self) -> dict[str, object]:
        return {"name": HOSTILE, "value": float("nan")}

    def display(self) -> list[Block]:
        return BLOCKS


def test_a_terminal_gets_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", screen := Screen())
    output.print_report(Report(), as_json=False)
    assert "\x1b[32mpassed" in screen.getvalue()


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.print_report(Report(), as_json=False)
    assert capsys.readouterr().out == plain(BLOCKS) + "\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_every_name_can_be_printed_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding, write_through=True))
    output.print_report(Report(), as_json=True)
    assert json.loads(raw.getvalue().decode(encoding)) == {"name": HOSTILE, "value": None}
    output.print_report(Report(), as_json=False)


def test_errors_are_one_harmless_line(marlinq: Callable, operation: Callable) -> None:
    from marlinq.core.errors import CheckpointError

    operation("marlinq.operations.inspect", "inspect", CheckpointError(f"a: tensor {HOSTILE}"))
    err = marlinq("inspect", "a").err
    assert err == f"error: a: tensor {escaped(' '.join(HOSTILE.split()))}\n"
