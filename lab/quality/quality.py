"""Measures the cost of 4 bits against FP32: round-to-nearest, GPTQ step by step, and the named qualities.

    python -m lab.quality.quality MODEL --calibration FILE --text FILE [--text FILE] [--json OUT]

Quantises MODEL once a row, with one group size, then measures perplexity, mean KL divergence and top-1
agreement on windows of each text. Everything but the named options is the product's default. All models are
evaluated in float32, so nothing but the weights differs. Folders that are finished are used again,
interrupted ones continued. ``--row`` chooses rows.

Figures in docs/results.md: AMD EPYC (2 threads), torch 2.13.0+cpu, transformers 5.23.0; H100 and H200, CUDA
13.0, torch 2.11.0, transformers 5.17.0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lab.quality.measuring import (
    add_json,
    add_rows,
    conditions,
    measured,
    parser_of,
    recipe_of,
    report_progress,
    write_record,
)
from marlinq import load, quantize
from marlinq.checkpoint import Checkpoint
from marlinq.operations.quantize.recipe import Recipe

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "rtn": ("round-to-nearest", {"method": "rtn"}),
    "gptq-plain": (
        "GPTQ, no clip search, no drift correction",
        {"clip_search": False, "drift_correction": 0},
    ),
    "gptq-clip": ("GPTQ, no drift correction", {"drift_correction": 0}),
    "fast": ("`--quality fast`", {"quality": "fast"}),
    "default": ("`--quality default`", {"quality": "default"}),
    "scales": ("the default and `--tune-steps 60`", {"quality": "default", "tune_steps": 60}),
    "best": ("`--quality best`", {"quality": "best"}),
    "documents": ("`--quality best --no-tune-own-text`", {"quality": "best", "tune_own_text": False}),
}
"""Folder -> (title of the row, changes of the recipe)."""


def main() -> None:
    """Quantise, evaluate, print a table."""
    options = _options()
    recipe = recipe_of(options, symmetric=not options.asym, seed=options.seed)
    if options.act_order is not None:
        recipe = recipe.replace(act_order=options.act_order)
    wanted = options.rows or list(ROWS)
    recipes = {name: recipe.replace(**ROWS[name][1]) for name in wanted}
    options.work.mkdir(parents=True, exist_ok=True)

    for name, asked in recipes.items():
        folder = options.work / name
        if folder.exists():
            _check_same(folder, options.model, asked)
            print(f"{name}: {folder} is finished", file=sys.stderr)
        else:
            report = quantize(
                options.model,
                folder,
                recipe=asked,
                device=options.device,
                resume=folder.with_name(f"{folder.name}.partial").exists(),
                progress=report_progress,
            )
            print(report.render(), file=sys.stderr)

    original = load(options.model, device=options.device, dtype="float32")
    rows: list[dict[str, Any]] = []
    for text in options.text:
        for name in wanted:
            result = measured(options.work / name, original, text, options)
            shared = {"text": text.name, "windows": result.windows}
            if name == wanted[0]:
                rows.append({"name": "FP32", **shared, "perplexity": result.against_perplexity})
            rows.append(
                {
                    "name": ROWS[name][0],
                    **shared,
                    "perplexity": result.perplexity,
                    "kl": result.kl,
                    "top1_agreement": result.top1_agreement,
                }
            )
            print(result.render(), file=sys.stderr)

    order = recipe.to_dict()["act_order"]
    symmetry = "symmetric" if recipe.symmetric else "asymmetric"
    calibration = f"{recipe.samples} documents of up to {recipe.max_length} tokens, seed {recipe.seed}"
    lines = conditions(
        original,
        f"{options.model.name}: {symmetry}, group size {recipe.group_size}, act order {order}",
        f"calibrated on {options.calibration.name}: {calibration}",
        f"evaluated on windows of {options.length} tokens",
    )
    print("\n".join(lines))
    print(_table(rows))
    write_record(options.json, lines, rows, recipe=recipe.to_dict())


def _check_same(folder: Path, model: Path, recipe: Recipe) -> None:
    """Checks that a finished folder was made from this model with this recipe."""
    manifest = json.loads((folder / "marlinq.json").read_text(encoding="utf-8"))
    # Through JSON, to compare with the manifest's values.
    asked = json.loads(json.dumps([recipe.to_dict(), Checkpoint.open(model).identity()]))
    if [manifest["recipe"], manifest["source"]["identity"]] != asked:
        raise SystemExit(f"{folder}: holds another model or recipe; remove it, or choose another --work")


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| text | weights | perplexity | mean KL, nats | top-1 agreement |", "| --- " * 5 + "|"]
    for row in rows:
        kl = f"{row['kl']:.4f}" if "kl" in row else ""
        agreed = f"{100 * row['top1_agreement']:.2f} %" if "kl" in row else ""
        text = f"{row['text']}, {row['windows']} windows"
        lines.append(f"| {text} | {row['name']} | {row['perplexity']:.3f} | {kl} | {agreed} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        work=Path("build/quality"),
        group_size=64,
        samples=64,
        max_length=512,
        seed=0,
        windows=32,
        length=1024,
    )
    add_rows(parser, ROWS)
    parser.add_argument("--asym", action="store_true", help="with zero points")
    parser.add_argument("--act-order", help="default: the product's")
    add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
