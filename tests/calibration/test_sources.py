"""One reader for calibration and evaluation: spellings, columns, what can't be read, and no traces left."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from marlinq.calibration.chat import Chat
from marlinq.calibration.sources import Row, Source, read_paragraphs, read_passages
from marlinq.core.errors import EnvironmentProblem, UsageError


def paragraphs(source: object) -> list[Row]:
    return list(read_paragraphs(str(source), split="train", seed=0))


def passages(source: object) -> list[Row]:
    return list(read_passages(str(source), split="train"))


def jsonl(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["novel.md", "novel.txt"])
def test_a_text_file_in_paragraphs_and_in_one_piece(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes("one\r\nline\n \n\ntwo\u2028é".encode())
    assert paragraphs(path) == ["one\nline", "two\u2028é"]
    assert passages(path) == ["one\nline\n \n\ntwo\u2028é"]


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
def test_text_is_read_as_the_library_would(ends: bytes, tmp_path: Path) -> None:
    """A ``.txt`` has a reader of its own; under another name the library has the same file."""
    content = "\ufeffone\x0b\x0c\x1c\x85line\u2029||two|||three |\t|four".encode().replace(b"|", ends)
    pages = [tmp_path / "a.txt", tmp_path / "a.md"]
    for page in pages:
        page.write_bytes(content)
    assert paragraphs(pages[0]) == paragraphs(pages[1])
    assert passages(pages[0]) == passages(pages[1])
    assert len(paragraphs(pages[0])) == 4


def test_a_text_file_takes_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n")
    assert paragraphs(path) == ["one", "two"]
    with pytest.raises(ImportError):
        paragraphs(path.rename(tmp_path / "a.md"))


def test_rows_are_the_same_for_both(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    assert paragraphs(path) == ["one", "two"]
    assert passages(path) == ["one\n\n", "two\n\n"]
    path = jsonl(tmp_path / "b.jsonl", {"input_ids": [1, 2], "text": "one"})
    assert paragraphs(path) == passages(path) == [[1, 2]]
    path = jsonl(tmp_path / "c.jsonl", {"id": "x", "messages": [{"role": "user", "content": "hi"}]})
    assert paragraphs(path) == passages(path) == [Chat(({"role": "user", "content": "hi"},))]


ROWS = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.JSONL", ROWS),
        ("a.ndjson", ROWS),
        ("a.jsonl", b"\xef\xbb\xbf" + ROWS),
        ("a.jsonl.gz", gzip.compress(ROWS)),
        ("a.CSV", b"text\none\ntwo\n"),
        ("a.csv.gz", gzip.compress(b"text\none\ntwo\n")),
        ("a.JSON", b'[{"text": "one"}, {"text": "two"}]'),
        ("a.txt", b"\xef\xbb\xbfone\n\ntwo"),
        ("a.TXT", b"one\n\ntwo"),
        ("a.txt.gz", gzip.compress(b"one\n\ntwo")),
    ],
)
def test_tables_are_recognised_however_they_are_stored(tmp_path: Path, name: str, content: bytes) -> None:
    # Taken for plain text, the rows of a table would be one document with all their punctuation.
    path = tmp_path / name
    path.write_bytes(content)
    assert paragraphs(path) == ["one", "two"]


def test_token_ids_that_a_mask_leaves_out_are_left_out(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        {"input_ids": [7, 7, 1, 2], "attention_mask": [0, 0, 1, 1]},
        {"input_ids": [3, 4], "attention_mask": [1, 1]},
        {"input_ids": [5, 6], "attention_mask": None},
        {"input_ids": [5, 6], "attention_mask": [1]},
    )
    *rows, last = paragraphs(path)
    assert rows == [[1, 2], [3, 4], [5, 6]]
    assert "'attention_mask' has another length" in getattr(last, "reason", "")


def test_cells_of_a_csv_are_text_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,story\n1,NA\n2,"two\nlines"\n3,null\n')
    assert paragraphs(path) == ["NA", "two\nlines", "null"]


def test_a_row_of_too_many_cells_does_not_move_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,id\nx,1,2,3\ny,4\n")
    with pytest.warns(Warning, match="loss of data"):
        assert paragraphs(path) == ["x", "y"]


@pytest.mark.parametrize("name", ["a[1].txt", "b*.txt", "c?.txt", "d#e.txt", "f@g:h.txt"])
def test_file_names_are_not_patterns(tmp_path: Path, name: str) -> None:
    for other in ("a1.txt", "bb.txt", "cc.txt"):
        (tmp_path / other).write_text("another file")
    (tmp_path / name).write_text("this file")
    assert paragraphs(tmp_path / name) == ["this file"]


def test_spellings_of_datasets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = Source.parse("org/name:en@validation#body", split="train")
    assert source.request == {"path": "org/name", "name": "en", "split": "validation"}
    assert (source.dataset, source.column) == ("org/name", "body")
    source = Source.parse("name", split="test")
    assert source.request == {"path": "name", "name": None, "split": "test"}
    folder = tmp_path / "corpus"
    folder.mkdir()
    jsonl(folder / "train.jsonl", {"a": "x", "b": "y"})
    assert passages(f"{folder}@train#b") == ["y\n\n"]
    with pytest.raises(UsageError, match="corpus@nothing: can't be read"):
        passages(f"{folder}@nothing")
    (folder / "README.md").write_text("no metadata")
    assert passages(f"{folder}#a") == ["x\n\n"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["text", "json", "a@b", "c#d"])
def test_a_folder_is_one_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "beside.jsonl", {"text": "not this"})
    (tmp_path / name).mkdir()
    jsonl(tmp_path / name / "train.jsonl", {"text": "this", "body": "that"})
    assert paragraphs(name) == ["this"]
    assert paragraphs(f"{name}#body") == ["that"]


@pytest.mark.parametrize(
    "spelling",
    [
        "absent.txt",
        "./absent",
        "/absent/file",
        "a/b/c",
        "absent.csv#x",
        "text",
        "csv",
        "name@",
        "a b",
        "",
        "#x",
    ],
)
def test_spellings_that_are_neither_a_file_nor_a_dataset_are_refused(spelling: str) -> None:
    with pytest.raises(UsageError, match=r"no such file, and not a dataset as NAME|expected a file"):
        passages(spelling)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"not json\n", "can't be read .*JSON"),
        ("a.jsonl", b"[1]\n", "which column|can't be read|holds"),
        ("a.json", b"{", "can't be read"),
        ("a.json", b'{"rows": []}', "which column.*rows"),
        ("a.txt", b"\xff\xfe\xff", "not UTF-8"),
        ("a.txt", b"", "the file is empty"),
        ("a.jsonl", b"", "the file is empty"),
        ("a.csv", b'text\n"without an end', "can't be read .*EOF inside string"),
        ("a.parquet", b"PAR1 nothing", "can't be read .*[Pp]arquet"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', "which column holds the text.*a, b"),
        ("a.jsonl", b'{"text": 3}\n', "column 'text' holds int, expected text"),
        ("a.jsonl", b'{"text": [1, 2]}\n', "column 'text' holds list, expected text"),
        ("a.jsonl", b'{"messages": [{"speaker": "x"}]}\n', "column 'messages' holds list, expected text"),
    ],
)
def test_unreadable_files_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for read in (paragraphs, passages):
        with pytest.raises(UsageError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    # The library has nothing to say besides.
    assert capfd.readouterr().err == ""


def test_evaluation_skips_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for second in (b'{"body": "y"}', b"{"):
        path.write_bytes(b'{"text": "x"}\n' + second + b"\n")
        with pytest.raises(UsageError, match="row 2: (column 'text' holds nothing|can't be read as JSON)"):
            passages(path)
        assert [isinstance(row, str) for row in paragraphs(path)] == [True, False]


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "x"})
    with pytest.raises(UsageError, match="column 'body' holds nothing.*name another of text as #COLUMN"):
        paragraphs(f"{path}#body")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match="a text file has no column 'body'"):
        paragraphs(f"{tmp_path / 'a.txt'}#body")


def test_paths_that_are_no_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UsageError, match=r"pipe\.txt: expected a file or a folder"):
        paragraphs(tmp_path / "pipe.txt")
    with pytest.raises(UsageError, match="File name too long"):
        paragraphs("prose instead of a path " * 20)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The Hub's libraries may go online, and any attempt is noted and fails."""
    attempts: list[object] = []

    def refuse(*arguments: object, **options: object) -> None:
        attempts.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


def test_local_files_ask_no_network_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[object]
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
    folder = tmp_path / "corpus"
    folder.mkdir()
    (tmp_path / "a.txt").write_text("text")
    for source in (jsonl(folder / "a.jsonl", {"text": "x"}), folder, tmp_path / "a.txt"):
        paragraphs(source)
    assert no_network == []
    assert not cache.exists()


def cached(cache: Path) -> Path:
    """A dataset of one row, as ``datasets`` keeps it after a download."""
    import datasets

    folder = cache / "org___story" / "default" / "0.0.0" / "abc"
    prepared = datasets.Dataset.from_dict({"text": ["a cached row"]})
    prepared.info.splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=1)})
    prepared.info.dataset_name, prepared.info.config_name = "story", "default"
    folder.mkdir(parents=True)
    prepared.info.write_to_directory(str(folder))
    with (folder / "story-train.arrow").open("wb") as file:
        table = prepared.data.table
        import pyarrow

        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return folder


@pytest.mark.parametrize("setting", [True, False], ids=["HF_HUB_OFFLINE", "no network"])
def test_a_dataset_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[object], setting: bool
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", setting)
    monkeypatch.setattr(constants, "ENDPOINT", f"https://hub.invalid/{setting}")
    with pytest.raises(EnvironmentProblem, match="there are no datasets in the cache"):
        passages("org/story")
    cached(tmp_path)
    with pytest.raises(EnvironmentProblem, match="org/other@train: no .*s in the cache: org/story") as caught:
        passages("org/other@train")
    assert ("HF_HUB_OFFLINE is set" if setting else "no network in this test") in str(caught.value)
    with pytest.warns(UserWarning, match="org/story: read from the cache"):
        assert passages("org/story") == ["a cached row\n\n"]
    # One question to the network for all of it, and none when it is switched off.
    assert len(no_network) == (0 if setting else 1)
