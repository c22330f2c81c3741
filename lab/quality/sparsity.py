"""Measures the cost of 2:4 sparsity beside dense 4-bit weights, and dense 3-bit weights of the same size.

    python -m lab.quality.sparsity MODEL --calibration FILE --text FILE [--row NAME] [--json OUT]

Quantises MODEL once a row with the product's defaults but for the named settings, then measures mean KL
divergence from the original and top-1 agreement. A sparse weight has 2 codes of 4 bits and 4 bits of mask
for 4 channels: 3 bits a weight. Three-bit codes have no layout; they are stored as the middle eight of
sixteen, which stand for the same weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lab.quality.measuring import (
    add_json,
    add_rows,
    conditions,
    measured,
    parser_of,
    recipe_of,
    report_progress,
    row_of,
    write_record,
)
from marlinq import load, quantize
from marlinq.core.scheme import INT4, Element, Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.methods import SolveReport, register_method
from marlinq.methods.gptq import GPTQ, GPTQOptions
from marlinq.methods.hessian import HessianAccumulator
from marlinq.methods.tuning import TunableWeight
from marlinq.operations.quantize.override import Override

INT3 = Element("int3", 3)
"""Element with eight values, the middle one zero; solvers take it, no layout holds it."""


class ThreeBits(GPTQ):
    """GPTQ with eight codes, stored as the middle eight of sixteen."""

    name = "gptq-int3"

    def solve(
        self,
        weights: Sequence[Tensor],
        statistics: HessianAccumulator | None,
        scheme: Scheme,
        options: GPTQOptions,
        *,
        names: Sequence[str],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        narrow = replace(scheme, element=INT3)
        found = super().solve(weights, statistics, narrow, options, names=names)
        shift = INT4.midpoint - INT3.midpoint
        return [(_widened(weight, shift), report) for weight, report in found]


def _widened(weight: QuantizedWeight, shift: int) -> QuantizedWeight:
    return replace(weight, element=INT4, codes=weight.codes + shift, zeros=weight.zeros + shift)


@contextmanager
def eight_codes_tuned() -> Iterator[None]:
    """Inside, tuning keeps codes among the middle eight of sixteen."""
    begin = TunableWeight.__init__
    lowest = INT4.midpoint - INT3.midpoint

    def init(self: TunableWeight, *arguments: Any, **names: Any) -> None:
        begin(self, *arguments, **names)
        if self.latent is not None:
            with torch.no_grad():
                self.latent.clamp_(lowest - ROOM, lowest + INT3.codes - 1 + ROOM)
            self.latent.register_post_accumulate_grad_hook(
                lambda leaf: leaf.data.clamp_(lowest - ROOM, lowest + INT3.codes - 1 + ROOM)
            )

    with mock.patch.object(TunableWeight, "__init__", init):
        yield


ROOM = 0.4
"""How far a latent code may be beyond the first or last of eight; a step moves it by a hundredth."""


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("INT4, dense", {}),
    "int3": ("INT3, dense", {"method": ThreeBits.name}),
    "one-shot": (
        "INT4, 2:4, SparseGPT and GPTQ alone",
        {"sparsity": "2:4", "clip_search": False, "shrinkage": 0, "drift_correction": 0},
    ),
    "sparse": ("INT4, 2:4", {"sparsity": "2:4"}),
    "half": ("INT4, the half of the linears that lose least 2:4", {"sparsity": "2:4"}),
}
"""Folder -> (title of the row, changes of the recipe)."""


def main() -> None:
    """Quantise, evaluate, print a table."""
    options = _options()
    register_method(ThreeBits())
    recipe = recipe_of(options, format="compressed-tensors").replace(quality=options.quality)
    if options.no_output_hessian:
        recipe = recipe.replace(output_hessian=False)
    if options.tune_steps >= 0:
        recipe = recipe.replace(tune_steps=options.tune_steps)
    options.work.mkdir(parents=True, exist_ok=True)
    original = load(options.model, device=options.device, dtype="float32")
    rows = []
    for name in options.rows or ROWS:
        label, changes = ROWS[name]
        if name == "int3":
            # Another method begins with its own options; these are the same.
            changes = {**asdict(recipe.options), **changes}
        folder = options.work / name
        if name == "half":
            changes = {**changes, "overrides": _dense_half(options.work / "sparse")}
        if not folder.exists():
            with eight_codes_tuned() if name == "int3" else nullcontext():
                quantize(
                    options.model,
                    folder,
                    recipe=recipe.replace(**changes),
                    device=options.device,
                    progress=report_progress,
                )
        for text in options.text:
            result = measured(folder, original, text, options)
            rows.append(row_of(label, text, result))
            print(json.dumps(rows[-1]), flush=True)
    without = ", without output_hessian" if options.no_output_hessian else ""
    lines = conditions(
        original,
        f"{options.model.name}: groups of {options.group_size}, quality {options.quality}{without}",
        f"calibrated on {options.samples} documents of up to {options.max_length} tokens",
        f"evaluated on {options.windows} windows of {options.length} tokens",
    )
    print("\n".join(lines))
    write_record(options.json, lines, rows)


def _dense_half(sparse: Path) -> tuple[Override, ...]:
    """Overrides that keep dense the half of the linears with the largest errors in the folder ``sparse``."""
    errors = {
        name.removeprefix("module "): module["relative_error"]
        for name, module in json.loads((sparse / "marlinq.json").read_text())["run"].items()
        if name.startswith("module ")
    }
    worst = sorted(errors, key=lambda name: errors[name], reverse=True)[: len(errors) // 2]
    return tuple(Override(f"^{name.replace('.', '[.]')}$", settings={"sparsity": "none"}) for name in worst)


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        work=Path("sparsity"),
        group_size=64,
        quality="default",
        samples=32,
        max_length=512,
        windows=16,
        length=512,
        device="cpu",
        tune_steps=-1,
    )
    add_rows(parser, ROWS)
    parser.add_argument("--no-output-hessian", action="store_true", help="a tenth of the time on a CPU")
    add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
