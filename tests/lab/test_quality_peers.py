"""Inputs of AutoRound in lab/quality/quality_peers.py."""

from __future__ import annotations

from lab.quality.quality_peers import full_rows


def test_every_row_begins_as_a_text_does() -> None:
    documents = [[1, 10, 11, 12], [1, 13], [14, 15, 16]]
    assert full_rows(documents, 4, 1) == [[1, 10, 11, 12], [1, 13, 14, 15]]


def test_rows_are_text_alone_without_a_beginning_token() -> None:
    assert full_rows([[1, 2, 3], [4, 5]], 2, None) == [[1, 2], [3, 4]]
