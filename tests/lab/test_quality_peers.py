"""Peers in lab/quality: inputs of AutoRound, rows of worst_case.py."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from lab.quality.quality_peers import METHODS, full_rows
from lab.quality.worst_case import PEER_ROWS, table


def test_every_row_begins_as_a_text_does() -> None:
    documents = [[1, 10, 11, 12], [1, 13], [14, 15, 16]]
    assert full_rows(documents, 4, 1) == [[1, 10, 11, 12], [1, 13, 14, 15]]


def test_rows_are_text_alone_without_a_beginning_token() -> None:
    assert full_rows([[1, 2, 3], [4, 5]], 2, None) == [[1, 2], [3, 4]]


def test_rows_of_peers_are_methods() -> None:
    assert PEER_ROWS.keys() <= METHODS.keys()


def test_table_divides_by_each_peer_that_a_file_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made-g64.jsonl"
    divergences = {"default": (1.0, 3.0), "autoround": (2.0, 2.0), "llmc-awq-signround": (4.0, 4.0)}
    rows = [{"row": name, "kl": {"a": kl[0], "b": kl[1]}} for name, kl in divergences.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table(Namespace(lines=[file]))
    assert capsys.readouterr().out.splitlines() == [
        "default over autoround: worst 1.50, mean 1.00",
        "  made-g64: a 0.50, b 1.50",
        "default over llmc-awq-signround: worst 0.75, mean 0.50",
        "  made-g64: a 0.25, b 0.75",
    ]
