"""What a model is evaluated on: windows of a text file, of a dataset, or of text that a model writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlinq.core import boundaries
from marlinq.core.errors import EnvironmentProblem, UsageError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.runtime import LoadedModel

_TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_DATASET = re.compile(
    r"(?P<name>[^:@#]+)(?::(?P<config>[^:@#]+))?(?:@(?P<split>[^:@#]+))?(?:#(?P<column>[^:@#]+))?"
)


@dataclass(frozen=True)
class EvaluationText:
    """Token windows that don't overlap, and where they come from."""

    source: str
    windows: tuple[tuple[int, ...], ...]


def read_windows(source: str, tokenizer: Any, *, windows: int, length: int) -> EvaluationText:
    """The first ``windows`` windows of ``length`` tokens of a text.

    Where the tokenizer begins every text with a token of its own, so does every window, as one of ``length``.

    Args:
        source: a text file, a table (.jsonl, .json, .parquet, .csv)[#COLUMN], or a dataset as
            ``NAME[:CONFIG][@SPLIT][#COLUMN]`` for the ``datasets`` library (split ``test`` by default; the
            column ``text``, or the only one that holds strings). Rows are joined by blank lines.
        tokenizer: the model's.
        windows: at most this many; fewer when the text ends.
        length: tokens a window.

    Raises:
        UsageError: the source can't be read, or does not fill one window.
        EnvironmentProblem: a table or dataset without ``datasets`` installed.
    """
    begin = _begin_tokens(tokenizer)
    step = length - len(begin)
    if step < 1:
        raise UsageError(f"length: expected more than {len(begin)}, found {length}")
    ids: list[int] = []
    for piece in _pieces(source):
        with boundaries.tokenizer(tokenizer):
            ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= windows * step:
            break
    count = min(windows, len(ids) // step)
    if count == 0:
        raise UsageError(
            f"text {source}: {len(ids)} tokens, fewer than one window of {step}; lower --length or add text"
        )
    cut = tuple((*begin, *ids[start * step : (start + 1) * step]) for start in range(count))
    return EvaluationText(source, cut)


def write_windows(
    loaded: LoadedModel,
    *,
    windows: int,
    length: int,
    seed: int,
    progress: ReportProgress = no_progress,
) -> EvaluationText:
    """``windows`` texts of up to ``length`` tokens that the model samples from ``seed``."""
    from marlinq.calibration import generate_documents

    with boundaries.forward(loaded.path):
        documents = generate_documents(
            loaded.model,
            loaded.model.config,
            samples=windows,
            max_length=length,
            seed=seed,
            device=loaded.device,
            progress=progress,
        )
    source = f"sampled from {loaded.path} with seed {seed}"
    return EvaluationText(source, tuple(document.tokens for document in documents))


def _begin_tokens(tokenizer: Any) -> tuple[int, ...]:
    with boundaries.tokenizer(tokenizer):
        first = tokenizer("a")["input_ids"][:1]
        return tuple(first) if first == [tokenizer.bos_token_id] else ()


def _pieces(source: str) -> Iterator[str]:
    path, column = Path(source), None
    try:
        if not path.exists() and "#" in source:
            text, _, column = source.rpartition("#")
            path = Path(text)
        is_file = path.is_file()
    except OSError as error:
        raise UsageError(f"text {source}: can't be read ({error.strerror})") from None
    if is_file and path.suffix in _TABLES:
        yield from _rows(
            source, {"path": _TABLES[path.suffix], "data_files": str(path), "split": "train"}, column
        )
    elif is_file:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"text {path}: not UTF-8 ({error.reason} at byte {error.start})") from None
        except OSError as error:
            raise UsageError(f"text {path}: can't be read ({error.strerror})") from None
    else:
        match = _DATASET.fullmatch(source)
        if match is None or path.suffix in (".txt", *_TABLES):
            raise UsageError(
                f"text {source}: no such file, and not a dataset as NAME[:CONFIG][@SPLIT][#COLUMN]"
            )
        request = {"path": match["name"], "name": match["config"], "split": match["split"] or "test"}
        yield from _rows(source, request, match["column"])


def _rows(source: str, request: dict[str, Any], column: str | None) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise EnvironmentProblem(
            f"text {source}: reading it needs the package datasets; install it, or pass a text file"
        ) from None
    try:
        for row in datasets.load_dataset(**request, streaming=True):
            column = column or _text_column(row, source)
            if not isinstance(row.get(column), str):
                raise UsageError(f"text {source}: column {column!r} is no text; there are {', '.join(row)}")
            yield row[column] + "\n\n"
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"text {source}: neither a file nor a dataset that can be loaded ({reason})"
        ) from None


def _text_column(row: dict[str, Any], source: str) -> str:
    strings = [name for name, cell in row.items() if isinstance(cell, str)]
    if "text" in strings:
        return "text"
    if len(strings) == 1:
        return strings[0]
    raise UsageError(f"text {source}: which column holds the text? Name one of {', '.join(row)} as #COLUMN")
