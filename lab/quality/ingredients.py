"""Measures the ingredients of a quality: each alone, left out or changed, on several texts.

    python -m lab.quality.ingredients MODEL --calibration FILE --text FILE [--text FILE] --work DIR

Quantises MODEL once a row on the same documents, prints mean KL and top-1 agreement on each text. Rows that
change what is no option of a recipe do so in this process alone: how much a token of the residual stream
counts, and which shrunken ranges the search of a group's scale tries.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lab.quality.measuring import add_rows, measured, parser_of, recipe_of
from marlinq import load, quantize
from marlinq.methods import drift, grid

FACTORS = len(grid.search_factors())


@contextmanager
def tokens_weighted_by_inverse() -> Iterator[None]:
    """Inside, tokens of the residual stream are weighted by the inverse of their mean square, as in version 2
    of the quality."""

    def add_stream(
        self: Any, x: Tensor, stream: Tensor, original: Tensor | None, mask: Tensor | None = None
    ) -> None:
        x, stream = x.reshape(-1, x.shape[-1]), stream.reshape(-1, stream.shape[-1])
        size = torch.linalg.vector_norm(stream, dim=1, keepdim=True, dtype=torch.float32)
        size = size / stream.shape[1] ** 0.5
        weights = torch.where(size > 0, 1 / size, 0.0).to(x.dtype)
        if original is None:
            self.add(x * weights, mask)
        else:
            difference = original.reshape(stream.shape).to(torch.float32) - stream.to(torch.float32)
            self._add(x * weights, difference.to(x.dtype) * weights, mask)

    with mock.patch.object(drift.PairedHessian, "add_stream", add_stream):
        yield


def ranges(step: float) -> Callable[[], Any]:
    """A change of the search for scales: the usual number of ranges, from 1.06 of the full one down in steps
    of ``step``."""
    factors = tuple(1.06 - step * number for number in range(FACTORS))
    return lambda: mock.patch.object(grid, "_SHRINK", factors)


ROWS: dict[str, tuple[dict[str, Any], tuple[Callable[[], Any], ...]]] = {
    "default": ({}, ()),
    "version 2": ({"shrinkage": 0.25}, (tokens_weighted_by_inverse, ranges(0.04))),
    "no drift correction": ({"drift_correction": 0}, ()),
    "no shrinkage": ({"shrinkage": 0}, ()),
    "neither": ({"drift_correction": 0, "shrinkage": 0}, ()),
    "no activation order": ({"act_order": "none"}, ()),
    "drift correction .5": ({"drift_correction": 0.5}, ()),
    "shrinkage .25": ({"shrinkage": 0.25}, ()),
    "shrinkage .5": ({"shrinkage": 0.5}, ()),
    "tokens by the inverse": ({}, (tokens_weighted_by_inverse,)),
    "ranges to .27": ({}, (ranges(0.065),)),
    "ranges to .58": ({}, (ranges(0.04),)),
    "ranges to .82": ({}, (ranges(0.02),)),
    "ranges to .82, shrinkage .5": ({"shrinkage": 0.5}, (ranges(0.02),)),
    "damp .03": ({"damp": 0.03}, ()),
    "four times the text": ({"samples": 256}, ()),
    "output Hessian": ({"output_hessian": True}, ()),
}
"""Name of a row -> (changes of the recipe, other changes)."""


def main() -> None:
    """Quantise, evaluate, print a line a row."""
    options = _options()
    recipe = recipe_of(options, seed=options.seed)
    options.work.mkdir(parents=True, exist_ok=True)
    original = load(options.model, device=options.device, dtype="float32")
    for name in options.rows or ROWS:
        settings, changes = ROWS[name]
        out = options.work / name.replace(" ", "-").replace(",", "")
        if not out.exists():
            with _all(changes):
                quantize(options.model, out, recipe=recipe.replace(**settings), device=options.device)
        row: dict[str, Any] = {"row": name}
        for text in options.text:
            result = measured(out, original, text, options)
            row[text.stem] = [result.kl, result.top1_agreement]
        print(json.dumps(row), flush=True)


@contextmanager
def _all(changes: tuple[Callable[[], Any], ...]) -> Iterator[None]:
    with changes[0]() if changes else nullcontext():
        if len(changes) > 1:
            with _all(changes[1:]):
                yield
        else:
            yield


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        work=Path("ingredients"),
        group_size=128,
        samples=64,
        max_length=512,
        seed=0,
        windows=32,
        length=1024,
    )
    add_rows(parser, ROWS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
