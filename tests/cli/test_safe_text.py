"""Nothing that a checkpoint holds fakes a line of a report, acts on a terminal or stops a report."""

from __future__ import annotations

import io
import json
import logging
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from marlinq.cli.output import log_safely, print_error, print_line, print_piece, print_report
from marlinq.core.display import Block, lines
from marlinq.core.errors import CheckpointError

HOSTILE = "a\nverified\r\x1b[2J\x9b31m\u202e\ud800.\udcff\x7f\u2028é日"
ACTING = ("\n", "\r", "\x1b", "\x9b", "\u202e", "\x7f", "\u2028")


@dataclass(frozen=True)
class Row:
    name: str


@dataclass(frozen=True)
class Hostile:
    rows: tuple[Row, ...] = (Row(HOSTILE),)
    names: dict[str, Any] = field(default_factory=lambda: {HOSTILE: [HOSTILE, 1, None]})

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [row.name for row in self.rows], "names": self.names}

    def display(self) -> list[Block]:
        return [lines("first", *(row.name for row in self.rows), *self.names)]


def test_a_report_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Hostile(), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1] == r"a\nverified\r\x1b[2J\x9b31m\u202e\ud800.\udcff\x7f\u2028é日"


def test_json_gives_back_what_was_there(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Hostile(), as_json=True)
    out = capsys.readouterr().out
    assert not any(mark in out for mark in ACTING[1:])
    assert json.loads(out) == Hostile().to_dict()


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_is_one_printable_line(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    assert print_error(CheckpointError(HOSTILE + "x" * 100_000), as_json=as_json) == 3
    captured = capsys.readouterr()
    text = captured.out if as_json else captured.err
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    assert len(text) < 5_000


def test_text_of_a_model_keeps_its_lines_and_joiners(capsys: pytest.CaptureFixture[str]) -> None:
    print_piece("two\nlines\tand 👩\u200d💻, \x1b[31mnot red\ud800")
    assert capsys.readouterr().out == "two\nlines\tand 👩\u200d💻, \\x1b[31mnot red\\ud800"


def test_an_encoding_without_the_character_gets_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_line("é日\ud800", file)
    file.flush()
    assert file.buffer.getvalue() == b"\\xe9\\u65e5\\ud800\n"  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdout", file)
    print_report(Hostile(), as_json=True)
    file.flush()
    text = file.buffer.getvalue().decode("ascii").partition("\n")[2]  # type: ignore[attr-defined]
    assert json.loads(text) == Hostile().to_dict()


def test_log_lines_of_libraries_are_printable_lines(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    log_safely()
    try:
        logging.getLogger("transformers").error("a model of type `%s`", HOSTILE)
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages[-1].isprintable()
