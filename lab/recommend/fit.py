"""Fits the constants of ``marlinq recommend``'s step model to measured steps, and says how far off it is.

    python lab/recommend/fit.py

A step is linear in the constants, so each one's share of a step is the step with that constant alone. Least
squares of relative errors, constants not below zero.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from marlinq.operations.bench.synthetic import Synthetic
from marlinq.operations.recommend.gpus import find_gpu
from marlinq.operations.recommend.shape import shape_of
from marlinq.operations.recommend.step_times import COSTS, decode
from marlinq.operations.recommend.weight_types import compared

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "recommend-h200.json"
NAMES = {"16": "16 bits", "int4": "int4 g128"}
_ROUNDS = 20_000


def main() -> None:
    """Prints both."""
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    kinds = {kind.name: kind for kind in compared()}
    gpu = find_gpu("h200")
    names = [each.name for each in fields(COSTS)]
    nothing = replace(COSTS, **dict.fromkeys(names, 0.0))
    rows, labels, expected = [], [], []
    shapes: dict[str, Any] = {}
    for row in measured["rows"]:
        shape = shapes.setdefault(row["shape"], None) or shape_of(
            row["shape"], Synthetic(row["shape"]).config()
        )
        shapes[row["shape"]] = shape
        kind = kinds[NAMES.get(row["scheme"], row["scheme"])]
        context = row["context"] + row["new_tokens"] / 2
        for batch, milliseconds in zip(row["batches"], row["step_ms"], strict=True):
            seconds = milliseconds / 1e3
            base = decode(shape, kind, gpu, batch, context, nothing).step
            shares = [
                decode(shape, kind, gpu, batch, context, replace(nothing, **{name: 1.0})).step - base
                for name in names
            ]
            rows.append([share / seconds for share in shares] + [base / seconds])
            labels.append((row["shape"], kind.name, batch, milliseconds))
            expected.append(decode(shape, kind, gpu, batch, context).step / seconds)
    table = np.array(rows)
    for name, value in zip(names, _fit(table[:, :-1], 1 - table[:, -1]), strict=True):
        print(f"{name:20} {getattr(COSTS, name):10.3g} fitted {value:10.3g}")
    for label, ratio in zip(labels, expected, strict=True):
        print(*label, f"ms, model {100 * (ratio - 1):+.1f} %")


def _fit(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Constants not below zero, by coordinate descent."""
    scale = np.maximum(np.linalg.norm(table, axis=0), 1e-30)
    unit = table / scale
    found = np.zeros(table.shape[1])
    for _ in range(_ROUNDS):
        for index in range(len(found)):
            left = wanted - unit @ found + unit[:, index] * found[index]
            found[index] = max(0.0, unit[:, index] @ left)
    return found / scale


if __name__ == "__main__":
    main()
