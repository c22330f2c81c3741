"""Shared by the scripts that quantise a model in several ways: their arguments, and divergences on texts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from marlinq import evaluate
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.evaluate import Evaluation
from marlinq.operations.quantize.recipe import Recipe
from marlinq.runtime import LoadedModel


def parser_of(doc: str | None, *, calibrates: bool = True, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with MODEL, --calibration, --text and --device, and an option for each of ``defaults``.

    Args:
        doc: docstring of the script.
        calibrates: whether there is --calibration.
        defaults: default values by names of options: a number, text or path, whose type the option takes.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    if calibrates:
        parser.add_argument("--calibration", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--text", type=Path, required=True, action="append", help="text to evaluate on")
    parser.add_argument("--device", default=defaults.pop("device", "auto"))
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser


def add_rows(parser: argparse.ArgumentParser, rows: Collection[str]) -> None:
    """The option --row, which may be repeated; ``options.rows`` is None without it."""
    parser.add_argument("--row", dest="rows", action="append", choices=rows, help="default: all of them")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option --json."""
    parser.add_argument("--json", type=Path, help="also write the result here")


def recipe_of(options: argparse.Namespace, **settings: Any) -> Recipe:
    """The product's recipe with the group size and the text of ``options``, and further settings."""
    return Recipe(
        group_size=options.group_size,
        calibration=str(options.calibration),
        samples=options.samples,
        max_length=options.max_length,
        **settings,
    )


def measured(
    quantized: Path | LoadedModel, original: LoadedModel, text: Path, options: argparse.Namespace
) -> Evaluation:
    """Perplexity, divergence from ``original`` and top-1 agreement on a text, computed in float32."""
    return evaluate(
        quantized,
        against=original,
        text=str(text),
        windows=options.windows,
        length=options.length,
        device=options.device,
        dtype="float32",
        progress=report_progress,
    )


def row_of(name: str, text: Path, result: Evaluation) -> dict[str, Any]:
    """The figures of a row on a text, by name."""
    return {
        "name": name,
        "text": text.name,
        "perplexity": result.perplexity,
        "original_perplexity": result.against_perplexity,
        "kl": result.kl,
        "top1_agreement": result.top1_agreement,
    }


def report_progress(stage: str, done: int, total: int) -> None:
    """Prints every eighth step to stderr."""
    if done % 8 == 0 or done == total:
        print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)


def conditions(original: LoadedModel, *lines: str) -> list[str]:
    """The hardware, and further lines."""
    return [hardware_line(original.device), *lines]


def write_record(
    path: Path | None, lines: Sequence[str], rows: Sequence[Mapping[str, Any]], **more: Any
) -> None:
    """Writes conditions and rows as JSON; nothing without a path."""
    if path is not None:
        record = {"conditions": lines, **more, "rows": rows}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
