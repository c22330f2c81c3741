"""The report's figures for programs: a row for each module as CSV, and everything as JSON."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from marlinq.core.safe_text import escaped
from marlinq.core.version import __version__
from marlinq.operations.report.figures import CheckpointFigures, ModuleFigures, plain_time

MADE_BY = "marlinq"

COLUMNS = (
    "checkpoint", "module", "block", "projection", "in_features", "out_features", "bits", "scheme", "bytes",
    "error", "error_of", "tokens", "fallback", "scale_min", "scale_p05", "scale_median", "scale_p95",
    "scale_max", "scale_negative", "codes_at_ends", "codes_unused",
)  # fmt: skip

# Characters at which a spreadsheet takes a cell for a formula, also in full width or after spaces.
_FORMULA = ("=", "+", "-", "@")
_FIRST = 100


def csv_text(checkpoints: Sequence[CheckpointFigures]) -> str:
    """A header and a row for each quantised module; what is unknown is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for figures in checkpoints:
        writer.writerows([_cell(value) for value in _row(figures, module)] for module in figures.modules)
    return file.getvalue()


def json_value(checkpoints: Sequence[CheckpointFigures]) -> dict[str, Any]:
    """Everything, as plain values."""
    return {
        "made_by": f"{MADE_BY} {__version__}",
        "checkpoints": [_plain(figures) for figures in checkpoints],
    }


def json_text(checkpoints: Sequence[CheckpointFigures]) -> str:
    """:func:`json_value` in ASCII: a name may hold half of a surrogate pair, which no encoding has."""
    return json.dumps(json_value(checkpoints), allow_nan=False) + "\n"


def _plain(figures: CheckpointFigures) -> dict[str, Any]:
    summary = {
        "bytes": figures.nbytes,
        "bits_per_weight": figures.bits_per_weight,
        "error_of": figures.quantity,
        "median_error": figures.median_error,
        "largest_error": figures.errors[-1] if figures.errors else None,
        "worst_module": figures.worst[0].name if figures.worst else None,
    }
    time = None if figures.time is None else plain_time(figures.time)
    return {**_fields(figures), **summary, "time": time}


def _fields(value: Any) -> Any:
    """A dataclass as a dictionary, nested ones too; not by ``asdict``, which copies every number of them."""
    if is_dataclass(value):
        return {name: _fields(of) for name, of in vars(value).items()}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return tuple(_fields(of) for of in value)
    return value


def _row(figures: CheckpointFigures, module: ModuleFigures) -> Sequence[object]:
    scales, total = module.scales, max(1, sum(module.codes))
    return (
        figures.name, module.name, module.block, module.projection, module.in_features, module.out_features,
        module.bits, module.scheme, module.nbytes, module.error, module.quantity, module.tokens,
        module.fallback, scales.smallest, scales.low, scales.middle, scales.high, scales.largest,
        scales.negative,
        (module.codes[0] + module.codes[-1]) / total, sum(1 for count in module.codes if not count),
    )  # fmt: skip


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = escaped(value)
    plain = unicodedata.normalize("NFKC", text[:_FIRST]).lstrip()
    return f"'{text}" if plain.startswith(_FORMULA) else text
