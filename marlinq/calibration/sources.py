"""Sources of text: files, folders and datasets, read row by row for calibration and evaluation.

The syntax of a source is

    FILE                                any text in UTF-8
    TABLE[#COLUMN]                      .jsonl (or .ndjson), .json (a list of rows), .parquet or .csv
    NAME[:CONFIG][@SPLIT][#COLUMN]      a dataset: a folder of such files, or a name on the Hub

A source is read as a stream and never held in memory or in a cache. Python reads ``.txt`` and ``.jsonl``
files; the ``datasets`` library, which takes a second to import, reads everything else, also compressed files.
Without ``#COLUMN`` the column is ``input_ids`` (token ids), ``text``, ``messages`` or ``conversations``
(chats), or else the only column with strings.
"""

from __future__ import annotations

import glob
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marlinq.calibration.chat import Chat, read_chat
from marlinq.core.boundaries import reason
from marlinq.core.errors import EnvironmentProblem, MarlinqError, UsageError
from marlinq.core.hub import HUB_NAME, cached_datasets, listed, why_unreachable
from marlinq.core.hub_answers import checked_answers
from marlinq.core.plain_values import load_json
from marlinq.core.safe_text import half_pair


@dataclass(frozen=True)
class Unusable:
    """A row without text, with the reason."""

    reason: str


Row = str | list[int] | Chat
"""A text, its token ids, or a conversation."""

_LINES = (".jsonl", ".ndjson")
_TABLES = {**dict.fromkeys(_LINES, "json"), ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""Endings of files that ``datasets`` decompresses; the one before says what they hold."""
_BYTE_ORDER_MARK = "\ufeff"
_NAMED = ("input_ids", "text", "messages", "conversations")
_DATASET = re.compile(
    r"(?P<name>[^:@#]+)(?::(?P<config>[^:@#]+))?(?:@(?P<split>[^:@#]+))?(?:#(?P<column>[^:@#]+))?"
)
_SHUFFLE_BUFFER = 10_000


@dataclass(frozen=True)
class Source:
    """A parsed source; build it with :meth:`parse`.

    Attributes:
        spelling: text as given, for messages.
        request: arguments of ``datasets.load_dataset``.
        column: column to read; None for the default column.
        plain: whether the file is text and not a table.
        dataset: name on the Hub; empty for a file or folder.
    """

    spelling: str
    request: Mapping[str, Any]
    column: str | None = None
    plain: bool = False
    dataset: str = ""

    @classmethod
    def parse(cls, spelling: str, *, split: str) -> Source:
        """Parses a source; ``split`` is the default split of a dataset.

        Raises:
            UsageError: there is no such file, or the syntax is wrong.
        """
        text, column = spelling, None
        try:
            if not Path(spelling).exists() and "#" in spelling:
                text, _, column = spelling.rpartition("#")
            path = Path(text)
            if path.is_file():
                return cls._file(spelling, path, column)
            if text and path.is_dir():
                return cls(spelling, {"path": str(path.absolute()), "split": split}, column)
            if text and path.exists():
                raise UsageError(f"text {path}: expected a file or a folder, found a device, pipe or socket")
            match = _DATASET.fullmatch(spelling)
            folder = Path(match["name"]) if match is not None and Path(match["name"]).is_dir() else None
        except OSError as error:
            raise UsageError(f"text {spelling}: can't be read ({error.strerror})") from None
        if match is None or not (folder or _may_be_on_the_hub(match["name"])):
            raise UsageError(
                f"text {spelling}: no such file, and not a dataset as NAME[:CONFIG][@SPLIT][#COLUMN]"
            )
        # An absolute path, because ``datasets`` would take a folder called "text" for its own text reader.
        name = str(folder.absolute()) if folder else match["name"]
        request = {"path": name, "name": match["config"], "split": match["split"] or split}
        return cls(spelling, request, match["column"], dataset="" if folder else name)

    @classmethod
    def _file(cls, spelling: str, path: Path, column: str | None) -> Source:
        packed = path.suffix.lower() in _COMPRESSED
        kind = _TABLES.get(Path(path.stem if packed else path.name).suffix.lower())
        if kind is None and column is not None:
            raise UsageError(f"text {path}: a text file has no column {column!r}")
        if path.stat().st_size == 0:
            raise UsageError(f"text {path}: the file is empty")
        # Escaped, because ``datasets`` takes patterns.
        request: dict[str, Any] = {
            "path": kind or "text",
            "data_files": [glob.escape(str(path))],
            "split": "train",
        }
        if kind == "csv":
            # A cell "NA" stays text, and a row with too many cells does not shift the columns.
            request |= {"keep_default_na": False, "index_col": False}
        elif kind is None:
            request["keep_linebreaks"] = True
        return cls(spelling, request, column, plain=kind is None)


def read_paragraphs(spelling: str, *, split: str, seed: int) -> Iterator[Row | Unusable]:
    """Reads a source for calibration: the rows of a table, or the paragraphs of a text file (separated by
    blank lines).

    A file is read completely and in order. Of a dataset, which may be endless, the first part is read and
    shuffled. Rows without text are returned as :class:`Unusable`.

    Args:
        spelling: the source.
        split: default split of a dataset.
        seed: seed of the shuffling.

    Raises:
        UsageError: the source can't be read, or has no text.
        EnvironmentProblem: the Hub is needed and can't be reached.
    """
    source = Source.parse(spelling, split=split)
    if source.plain:
        yield from _paragraphs(_lines(source))
    else:
        first: tuple[int, Unusable] | None = None
        usable = False
        for number, row in enumerate(_rows(source, seed), 1):
            if not isinstance(row, Unusable):
                usable = True
            elif first is None:
                first = number, row
            yield row
        if first is not None and not usable:
            raise UsageError(f"text {spelling}: no row holds text; row {first[0]}: {first[1].reason}")


def read_passages(spelling: str, *, split: str) -> Iterator[Row]:
    """Reads a source in order, for evaluation: a text file in one piece, or rows, each text followed by a
    blank line.

    Raises:
        UsageError: the source can't be read, or a row has no text.
        EnvironmentProblem: the Hub is needed and can't be reached.
    """
    source = Source.parse(spelling, split=split)
    if source.plain:
        yield "".join(_lines(source))
    else:
        for number, row in enumerate(_rows(source, None), 1):
            if isinstance(row, Unusable):
                raise UsageError(f"text {source.spelling}: row {number}: {row.reason}")
            yield row + "\n\n" if isinstance(row, str) else row


def _may_be_on_the_hub(name: str) -> bool:
    # Names with a file's suffix are missing files; "text" and "csv" are readers of ``datasets``, which would
    # read all files of the current folder.
    is_file = name.endswith((".txt", *_TABLES))
    is_reader = name.isidentifier() and find_spec(f"datasets.packaged_modules.{name}") is not None
    return HUB_NAME.fullmatch(name) is not None and not is_file and not is_reader


def _lines(source: Source) -> Iterator[str]:
    """The lines of a plain text file, with their line ends and without a byte order mark."""
    path = Path(source.spelling)
    own = path.suffix.lower() == ".txt"
    lines = _own_lines(path) if own else (row["text"] for row in _stream(source, None))
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix(_BYTE_ORDER_MARK)


def _own_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise _not_utf8(str(path), error) from None
    except OSError as error:
        raise UsageError(f"text {path}: can't be read ({reason(error)})") from error


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph).strip()
            paragraph = []
    if paragraph:
        yield "".join(paragraph).strip()


def _rows(source: Source, seed: int | None) -> Iterator[Row | Unusable]:
    column = source.column
    own = Path(source.request.get("data_files", [""])[0]).suffix.lower() in _LINES
    for row in _own_rows(source) if own else _stream(source, seed):
        if isinstance(row, Unusable):
            yield row
            continue
        column = column or _find_column(row, source)
        yield _read_cell(row, column)


def _own_rows(source: Source) -> Iterator[dict[str, Any] | Unusable]:
    """The rows of a file of JSON lines; blank lines are skipped."""
    path = Path(source.spelling if source.column is None else source.spelling.rpartition("#")[0])
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if not number:
                    line = line.removeprefix(_BYTE_ORDER_MARK.encode())
                if not line.strip():
                    continue
                try:
                    row = load_json(line)
                except (ValueError, RecursionError) as error:
                    yield Unusable(f"can't be read as JSON ({reason(error)})")
                    continue
                yield row if isinstance(row, dict) else Unusable("holds no JSON object")
    except OSError as error:
        raise UsageError(f"text {path}: can't be read ({reason(error)})") from error


def _read_cell(row: Mapping[str, Any], column: str) -> Row | Unusable:
    cell = row.get(column)
    if isinstance(cell, str):
        return _encodable(cell, cell, column)
    if isinstance(cell, list):
        if column == "input_ids" and all(type(item) is int for item in cell):
            return _unpadded(cell, row.get("attention_mask"))
        if (chat := read_chat(cell)) is not None:
            return _encodable(chat, json.dumps(cell, ensure_ascii=False, default=str), column)
    found = "nothing" if cell is None else type(cell).__name__
    return Unusable(
        f"column {column!r} holds {found}, expected text, chat messages (role and content) or, as input_ids, "
        f"token ids; name another of {', '.join(row)} as #COLUMN"
    )


def _unpadded(ids: list[int], mask: object) -> Row | Unusable:
    """The token ids without those that an ``attention_mask`` beside them leaves out."""
    if mask is None:
        return ids
    if not isinstance(mask, list) or len(mask) != len(ids):
        return Unusable("column 'attention_mask' has another length than 'input_ids'")
    return [token for token, seen in zip(ids, mask, strict=True) if seen]


def _encodable(row: Row, text: str, column: str) -> Row | Unusable:
    """``row``, unless its ``text`` has characters that no tokenizer takes."""
    if (half := half_pair(text)) is None:
        return row
    return Unusable(f"column {column!r} holds {half}, half of a surrogate pair, which is no text")


def _find_column(row: Mapping[str, Any], source: Source) -> str:
    for name in _NAMED:
        if name in row:
            return name
    strings = [name for name, cell in row.items() if isinstance(cell, str)]
    if len(strings) == 1:
        return strings[0]
    raise UsageError(
        f"text {source.spelling}: which column holds the text? Name one of {', '.join(row)} as #COLUMN"
    )


def _stream(source: Source, seed: int | None) -> Iterator[dict[str, Any]]:
    """The rows from ``datasets``; with a seed, those of a Hub dataset are shuffled, and limited in number."""
    import datasets

    online = bool(source.dataset) and _is_on_the_hub(source)
    checks = checked_answers() if online else nullcontext()
    with tempfile.TemporaryDirectory() as unused, _settings(datasets, online), checks:
        # Streams don't fill the cache but leave lock files in its folder, so they get a temporary one.
        request = source.request if source.dataset else {**source.request, "cache_dir": unused}
        try:
            rows = datasets.load_dataset(**request, streaming=True)
            if seed is not None and "data_files" not in request:
                rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER).take(_SHUFFLE_BUFFER)
            yield from rows
        except MarlinqError:
            raise
        except UnicodeDecodeError as error:
            raise _not_utf8(source.spelling, error) from None
        except Exception as error:
            # The readers of several libraries and the network raise errors of many types.
            raise UsageError(f"text {source.spelling}: can't be read ({reason(error)})") from error


def _not_utf8(spelling: str, error: UnicodeDecodeError) -> UsageError:
    return UsageError(f"text {spelling}: not UTF-8 ({error.reason} at byte {error.start})")


def _is_on_the_hub(source: Source) -> bool:
    """Whether the Hub can be reached; if False, the dataset is in the cache.

    Raises:
        EnvironmentProblem: the Hub can't be reached and the cache does not have the dataset.
    """
    obstacle = why_unreachable()
    if not obstacle:
        return True
    cached = cached_datasets()
    if source.dataset not in cached:
        raise EnvironmentProblem(
            f"text {source.spelling}: no such file or folder, and not available from the Hub ({obstacle}); "
            f"pass a file, or go online; {listed('datasets', cached)}"
        )
    warnings.warn(f"text {source.spelling}: read from the cache, for {obstacle}", stacklevel=2)
    return False


@contextmanager
def _settings(datasets: Any, online: bool) -> Iterator[None]:
    """Inside, ``datasets`` prints nothing and stays off the network unless ``online``; by default it reports
    its use to a server even for local files."""
    from huggingface_hub.utils import logging as hub_logging

    was_offline = datasets.config.HF_HUB_OFFLINE
    loggers = datasets.logging, hub_logging
    levels = [logger.get_verbosity() for logger in loggers]
    for logger in loggers:
        logger.set_verbosity(logging.CRITICAL)
    datasets.config.HF_HUB_OFFLINE = was_offline or not online
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)
