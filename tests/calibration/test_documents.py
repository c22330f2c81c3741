from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from marlinq.calibration import Document, documents_hash, load_tokenizer, read_documents
from marlinq.core.errors import CheckpointError, UsageError


class Bytes:
    """A tokenizer of one token a byte."""

    def __call__(
        self, texts: list[str], truncation: bool, max_length: int, add_special_tokens: bool
    ) -> dict[str, list[list[int]]]:
        ids = [list(text.encode()) for text in texts]
        return {"input_ids": [each[:max_length] for each in ids] if truncation else ids}


def read(source: object, **changes: Any) -> list[Document]:
    settings = {"samples": 4, "max_length": 40, "seed": 0, "vocabulary": 256} | changes
    return read_documents(str(source), tokenizer=Bytes, **settings)


TEXTS = [f"document {number:02d} " + "word " * number for number in range(1, 13)]


def as_texts(documents: list[Document]) -> list[str]:
    return [bytes(document.tokens).decode() for document in documents]


def write(path: Path, texts: list[str] = TEXTS, column: str = "text") -> Path:
    rows = [{column: text, "id": number} for number, text in enumerate(texts)]
    if path.suffix == ".txt":
        path.write_text("\n\n \n".join(texts) + "\n")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json", "parquet", "csv"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    found = as_texts(read(write(tmp_path / f"data.{suffix}"), samples=12))
    assert sorted(found) == sorted(text[:40].strip() if suffix == "txt" else text[:40] for text in TEXTS)


def test_documents_keep_their_length_up_to_the_maximum(tmp_path: Path) -> None:
    lengths = sorted(len(document) for document in read(write(tmp_path / "data.jsonl"), samples=12))
    assert lengths == sorted(min(len(text), 40) for text in TEXTS)


def test_the_draw_follows_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [f"a document with number {n:04d}" for n in range(200)])
    first, again, other = (read(path, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert documents_hash(first) == documents_hash(again) != documents_hash(other)
    assert len(set(first)) == 4
    # The reservoir reaches beyond the first rows.
    drawn = {int(text[-4:]) for seed in range(8) for text in as_texts(read(path, seed=seed))}
    assert max(drawn) > 100


@pytest.mark.parametrize("cell", ['"half a pair \\ud83d"', '[{"role": "user", "content": "\\ud83d"}]'])
def test_rows_with_half_of_a_surrogate_pair_are_skipped(tmp_path: Path, cell: str) -> None:
    path = write(tmp_path / "data.jsonl")
    path.write_text(path.read_text() + f'{{"text": {cell}, "id": 12}}\n')
    with pytest.warns(UserWarning, match=r"1 of 13 rows were skipped: row 13: .* holds \\ud83d, half of a"):
        assert len(read(path, samples=12)) == 12


def test_lines_of_one_document_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("\n\nfirst line here\nsecond line\n\n\n\nanother document, long enough\n")
    with pytest.warns(UserWarning, match="2 usable documents, fewer than the 4"):
        found = as_texts(read(path))
    assert sorted(found) == ["another document, long enough", "first line here\nsecond line"]


def test_fragments_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", ["short", "", "a document that is long enough"])
    with pytest.warns(UserWarning, match="1 usable"):
        assert as_texts(read(path)) == ["a document that is long enough"]
    with pytest.raises(UsageError, match="none of 16 tokens"):
        read(write(tmp_path / "data.jsonl", ["short"]))


def test_columns_are_named_or_found(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", column="body")
    assert as_texts(read(path)) == as_texts(read(f"{path}#body"))
    with pytest.raises(UsageError, match="column 'id' holds int.*body, id"):
        read(f"{path}#id")
    path.write_text(json.dumps({"a": "x" * 20, "b": "y" * 20}) + "\n")
    with pytest.raises(UsageError, match="Name one of a, b"):
        read(path)


def test_rows_of_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"input_ids": list(range(30))}) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read(path, max_length=20) == [Document(tuple(range(20)))]
        with pytest.raises(CheckpointError, match="token id 29 is outside the model's vocabulary of 25"):
            read(path, vocabulary=25)


def test_a_folder_of_files_is_read_as_a_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.jsonl")
    found = as_texts(read(f"{folder}@train#text", samples=12))
    assert sorted(found) == sorted(text[:40] for text in TEXTS)
    with pytest.raises(UsageError, match="corpus@nothing"):
        read(f"{folder}@nothing")


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)


def mixed_text() -> str:
    """300 paragraphs, parted by every kind of blank line, with odd characters at the end."""
    separators = ["\n\n", "\r\n\r\n", "\n \t\n", "\n\n\n\n", "\r\r"]
    pieces = []
    for n in range(300):
        words = " ".join(f"word{(n * 7 + i) % 13}" for i in range(n % 23))
        pieces.append(f"Paragraph {n}: {words}".replace(" word3", "\nword3") + separators[n % 5])
    return "\n\n  " + "".join(pieces) + "  end of the file without a line break \u2028 \x0b  é"


@pytest.mark.parametrize(("seed", "expected"), [(0, "a458623948d7855f"), (3, "340358706f914d0a")])
def test_the_documents_of_a_text_file_stay_the_same(tmp_path: Path, seed: int, expected: str) -> None:
    # The hashes are of the reader that opened text files itself, before ``datasets`` read them.
    path = tmp_path / "data.txt"
    path.write_bytes(mixed_text().encode())
    found = read(path, samples=20, max_length=60, seed=seed)
    assert documents_hash(found)[:16] == expected


BAD_ROWS = {
    "no JSON": "{",
    "no object": "7",
    "no text": json.dumps({"body": "x"}),
    "a number": json.dumps({"text": 3}),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_counted_named_and_skipped(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "data.jsonl")
    good = as_texts(read(path, samples=12))
    lines = path.read_text().splitlines()
    path.write_text("\n".join((*lines[:4], BAD_ROWS[kind], *lines[4:])) + "\n")
    with pytest.warns(UserWarning, match=r"data\.jsonl: 1 of 13 rows were skipped: row 5: ") as warned:
        assert sorted(as_texts(read(path, samples=12))) == sorted(good)
    assert len(warned) == 1
    path.write_text(f"{BAD_ROWS[kind]}\n" * 3)
    with pytest.raises(UsageError, match="no row holds text; row 1: |which column|holds nothing"):
        read(f"{path}#text" if kind == "no text" else path)


def test_a_row_of_unknown_ids_is_skipped_and_a_tokenizer_of_another_model_is_not(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [[number] * 20 for number in (1, 2, 300, 4)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="1 of 4 rows were skipped: row 3: token id 300 is outside"):
        assert sorted(document.tokens[0] for document in read(path, samples=3, vocabulary=256)) == [1, 2, 4]
    with pytest.raises(CheckpointError, match="token id .* is outside the model's vocabulary of 1"):
        read(path, vocabulary=1)
