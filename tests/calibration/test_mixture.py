"""Weights of sources, shares of the whole, token budgets and duplicates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlinq.calibration import Document, Duplicates, MixturePart, read_documents, read_part, shares
from marlinq.core.errors import UsageError
from tests.calibration.test_documents import Bytes, as_texts, write


def read(source: object, **changes: Any) -> list[Document]:
    settings = {"samples": None, "max_length": 40, "seed": 0, "vocabulary": 256} | changes
    return read_documents(str(source), tokenizer=Bytes, **settings)


def test_weights_stand_behind_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_part("text.jsonl") == MixturePart("text.jsonl", 1.0)
    assert read_part("self=0.25") == MixturePart("self", 0.25)
    assert read_part("c4:en@train#text=3") == MixturePart("c4:en@train#text", 3.0)
    with pytest.raises(UsageError, match="weight above 0"):
        read_part("self=0")
    with pytest.raises(UsageError, match=r"'self': expected a weight below 1e\+100, found inf; lower all"):
        read_part("self=" + "9" * 400)
    # No file can have a name as long as this.
    assert read_part("n" * 300 + "=2") == MixturePart("n" * 300, 2.0)
    monkeypatch.chdir(tmp_path)
    Path("a=2").write_text("text")
    assert read_part("a=2") == MixturePart("a=2", 1.0)


@given(st.integers(0, 10**6), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_add_up(total: int, weights: list[float]) -> None:
    found = shares(total, weights)
    assert sum(found) == total
    exact = [total * weight / sum(weights) for weight in weights]
    assert all(abs(share - wanted) < 1 for share, wanted in zip(found, exact, strict=True))


def test_tokens_are_the_bound(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [f"document {n:03d} " + "word " * 6 for n in range(60)])
    documents = read(path, tokens=500)
    assert sum(map(len, documents)) == 500
    assert {len(document) for document in documents[:-1]} == {40}
    # The same draw as by number, of which the last document is cut.
    assert read(path, samples=12)[:-1] == documents[:11][:11] or len(documents) == 13
    both = read(path, tokens=500, samples=3)
    assert len(both) == 3
    with pytest.warns(UserWarning, match="tokens in usable documents, fewer than the 9000 asked for"):
        assert len(read(path, tokens=9000)) == 60


def test_documents_that_were_there_are_passed_over(tmp_path: Path) -> None:
    same = ["A document of  Some length", "a document of some length", "another document, long enough"]
    path = write(tmp_path / "data.jsonl", [*same, "another document, long enough"])
    known = Duplicates()
    with pytest.warns(UserWarning, match="2 usable documents"):
        found = read(path, samples=4, duplicates=known)
    assert {text.casefold().split()[0] for text in as_texts(found)} == {"a", "another"}
    assert known.found == 2
    # Documents of another source count as duplicates too.
    with pytest.raises(UsageError, match="none of 16 tokens or more that was not there before"):
        read(write(tmp_path / "more.jsonl", same), samples=4, duplicates=known)


def test_documents_of_which_the_cut_leaves_the_same_are_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    rows = [[*range(30), end] for end in (1, 2, 3)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="1 usable"):
        assert len(read(path, samples=3, max_length=30)) == 1
    assert len(read(path, samples=3, max_length=31)) == 3


def test_text_can_become_messages(tmp_path: Path) -> None:
    class Chatty(Bytes):
        chat_template = "yes"

        def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
            (message,) = messages
            return f"<{message['role']}>{message['content']}"

    path = write(tmp_path / "data.jsonl", ["a document that is long enough"])
    (document,) = read_documents(
        str(path), tokenizer=Chatty, samples=1, max_length=60, seed=0, vocabulary=256, as_messages=True
    )
    assert as_texts([document]) == ["<user>a document that is long enough"]
