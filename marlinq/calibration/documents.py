"""Where calibration text comes from: files and datasets, sampled with a seed, tokenised at natural length."""

from __future__ import annotations

import hashlib
import json
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlinq.core import boundaries
from marlinq.core.errors import CheckpointError, EnvironmentProblem, UsageError

MIN_TOKENS = 16
"""Shorter documents (headings, blank fragments) are passed over: they hold no context worth measuring."""

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
_TEXT_COLUMN, _TOKEN_COLUMN = "text", "input_ids"
_DATASET = re.compile(
    r"(?P<name>[^:@#]+)(?::(?P<config>[^:@#]+))?(?:@(?P<split>[^:@#]+))?(?:#(?P<column>[^:@#]+))?"
)
_SHUFFLE_BUFFER = 10_000


@dataclass(frozen=True)
class Document:
    """Token ids of one calibration document, at its natural length."""

    tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def documents_hash(documents: Sequence[Document]) -> str:
    """SHA-256 over the token ids of all documents in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps(document.tokens).encode() + b"\n")
    return digest.hexdigest()


def read_documents(
    source: str,
    *,
    tokenizer: Callable[[], Any],
    samples: int,
    max_length: int,
    seed: int,
    vocabulary: int,
) -> list[Document]:
    """``samples`` documents drawn at random from ``source``, each cut to ``max_length`` tokens.

    Args:
        source: ``FILE[#COLUMN]`` with a .txt (documents parted by blank lines), .jsonl, .json or .parquet
            file, or ``DATASET[:CONFIG][@SPLIT][#COLUMN]`` for the ``datasets`` library (a Hub name or a
            folder; split ``train`` by default). The column defaults to ``text``, or to the only one that
            holds strings; a column ``input_ids`` holds token ids.
        tokenizer: makes the model's tokenizer; called when there is text to tokenise.
        samples: how many documents to draw; all of them, with a warning, when there are fewer.
        max_length: tokens that a document is cut to.
        seed: of the draw.
        vocabulary: number of token ids that the model knows.

    Raises:
        UsageError: the source is absent, of an unknown kind, or holds no usable document.
        CheckpointError: a token id is beyond the vocabulary.
    """
    # Some drawn documents turn out too short, so more are drawn than asked for.
    candidates = _draw(_rows(source, seed), 2 * samples + 16, seed)
    encode: Callable[[str], list[int]] | None = None
    documents: list[Document] = []
    for row in candidates:
        if isinstance(row, str):
            if encode is None:
                encode = _encoder(tokenizer(), max_length)
            tokens = encode(row)
        else:
            tokens = row[:max_length]
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise CheckpointError(
                f"{source}: token id {max(tokens)} is outside the model's vocabulary of {vocabulary}; "
                "the tokenizer belongs to another model"
            )
        if len(tokens) >= min(MIN_TOKENS, max_length):
            documents.append(Document(tuple(tokens)))
        if len(documents) == samples:
            break
    if not documents:
        raise UsageError(
            f"calibration {source}: {len(candidates)} documents, none of {MIN_TOKENS} tokens or more"
        )
    if len(documents) < samples:
        warnings.warn(
            f"calibration {source}: {len(documents)} usable documents, fewer than the {samples} asked for",
            stacklevel=2,
        )
    return documents


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    with boundaries.tokenizer(folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _encoder(tokenizer: Any, max_length: int) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        with boundaries.tokenizer(tokenizer):
            ids: list[int] = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        return ids

    return encode


def _draw(rows: Iterable[str | list[int]], count: int, seed: int) -> list[str | list[int]]:
    """A uniform sample in random order that never holds more than ``count`` rows (Vitter's algorithm R)."""
    generator = random.Random(seed)
    kept: list[str | list[int]] = []
    for index, row in enumerate(rows):
        if index < count:
            kept.append(row)
        elif (place := generator.randrange(index + 1)) < count:
            kept[place] = row
    generator.shuffle(kept)
    return kept


def _rows(source: str, seed: int) -> Iterator[str | list[int]]:
    path, column = Path(source), None
    try:
        if not path.exists() and "#" in source:
            text, _, column = source.rpartition("#")
            path = Path(text)
        if path.is_file():
            return _file_rows(path, column)
    except OSError as error:
        raise UsageError(f"calibration {source}: can't be read ({error.strerror})") from None
    if path.suffix in SUFFIXES:
        raise UsageError(f"calibration {path}: no such file")
    return _dataset_rows(source, seed)


def _file_rows(path: Path, column: str | None) -> Iterator[str | list[int]]:
    readers = {".txt": _txt_rows, ".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    reader = readers.get(path.suffix)
    if reader is None:
        raise UsageError(f"calibration {path}: expected a file ending in {', '.join(SUFFIXES)}")
    try:
        yield from reader(path, column)
    except OSError as error:
        raise UsageError(f"calibration {path}: can't be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"calibration {path}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"calibration {path}: not JSON ({error}); expected rows with a text column"
        ) from None


def _txt_rows(path: Path, column: str | None) -> Iterator[str]:
    if column is not None:
        raise UsageError(f"calibration {path}: a text file has no column {column!r}")
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines).strip()
                lines = []
    if lines:
        yield "".join(lines).strip()


def _jsonl_rows(path: Path, column: str | None) -> Iterator[str | list[int]]:
    with path.open(encoding="utf-8") as file:
        yield from _cells((json.loads(line) for line in file if line.strip()), column, str(path))


def _json_rows(path: Path, column: str | None) -> Iterator[str | list[int]]:
    with path.open(encoding="utf-8") as file:
        rows = json.load(file)
    if not isinstance(rows, list):
        raise UsageError(f"calibration {path}: expected a list of rows, found {type(rows).__name__}")
    yield from _cells(rows, column, str(path))


def _parquet_rows(path: Path, column: str | None) -> Iterator[str | list[int]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise EnvironmentProblem("reading .parquet needs pyarrow; install it, or use .jsonl") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256, columns=[column] if column else None):
                yield from _cells(batch.to_pylist(), column, str(path))
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"calibration {path}: not a readable parquet file ({reason})") from None


def _dataset_rows(source: str, seed: int) -> Iterator[str | list[int]]:
    match = _DATASET.fullmatch(source)
    if match is None:
        raise UsageError(
            f"calibration {source!r}: expected 'self', a file, or a dataset as NAME[:CONFIG][@SPLIT][#COLUMN]"
        )
    try:
        import datasets
    except ImportError:
        raise EnvironmentProblem(
            f"calibration {source!r}: no such file, and datasets is not installed to look it up"
        ) from None
    try:
        rows = datasets.load_dataset(
            match["name"], match["config"], split=match["split"] or "train", streaming=True
        )
        # A stream can be endless, so it is shuffled through a buffer and its first part is taken.
        shuffled = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER).take(_SHUFFLE_BUFFER)
        yield from _cells(shuffled, match["column"], source)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"calibration {source!r}: neither a file nor a dataset that can be loaded ({reason})"
        ) from None


def _cells(rows: Iterable[Any], column: str | None, source: str) -> Iterator[str | list[int]]:
    for row in rows:
        if isinstance(row, str) and column is None:
            yield row
            continue
        if not isinstance(row, dict):
            raise UsageError(f"calibration {source}: expected rows with columns, found {type(row).__name__}")
        column = column or _choose_column(row, source)
        cell: Any = row.get(column)
        if not (isinstance(cell, str) or (column == _TOKEN_COLUMN and _is_tokens(cell))):
            raise UsageError(
                f"calibration {source}: column {column!r} holds {type(cell).__name__}, expected text; "
                f"name another of {', '.join(row)} as #COLUMN"
            )
        yield cell


def _is_tokens(cell: Any) -> bool:
    return isinstance(cell, list) and all(type(item) is int for item in cell)


def _choose_column(row: dict[str, Any], source: str) -> str:
    for name in (_TOKEN_COLUMN, _TEXT_COLUMN):
        if name in row:
            return name
    strings = [name for name, cell in row.items() if isinstance(cell, str)]
    if len(strings) == 1:
        return strings[0]
    raise UsageError(
        f"calibration {source}: which column holds the text? Name one of {', '.join(row)} as #COLUMN"
    )
