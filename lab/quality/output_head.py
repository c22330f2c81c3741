"""Measures the cost of a quantised output head: 16, 8 and 4 bits, with blocks in 16 and in 4 bits.

    python -m lab.quality.output_head MODEL --quantised FOLDER --calibration FILE --text FILE
        [--work FOLDER] [--json OUT]

FOLDER holds MODEL with quantised blocks and a head in 16 bits. The head is quantised last and changes no
block, so one set of blocks serves all heads: they are dequantised, and every head is made by the quantise
operation with an override that skips the blocks. All models compute in float32. Folders that are finished
are used again.

Figures in docs/results.md: AMD EPYC (2 threads), torch 2.13.0+cpu, transformers 5.23.0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lab.quality.measuring import add_json, conditions, measured, parser_of, report_progress, write_record
from marlinq import load, quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe

BLOCKS = r"\.\d+\."
"""Regular expression that matches the name of every linear in a block."""


def main() -> None:
    """Quantise heads, evaluate, print a table."""
    options = _options()
    (text,) = options.text
    recipe = Recipe(
        group_size=options.group_size,
        calibration=str(options.calibration),
        samples=options.samples,
        max_length=options.max_length,
        overrides=(Override(BLOCKS, skip=True),),
    )
    options.work.mkdir(parents=True, exist_ok=True)
    original = load(options.model, device=options.device, dtype="float32")
    dense = options.work / "dequantised"
    if not dense.exists():
        loaded = load(options.quantised, device=options.device, dtype="float32", operator="dense")
        loaded.model.save_pretrained(dense)
        tokenizer: Any = loaded.tokenizer
        tokenizer.save_pretrained(dense)
        del loaded
    rows: list[dict[str, Any]] = []
    for blocks, folder in (("16-bit", options.model), ("4-bit", dense)):
        for head in ("none", "int8", "int4"):
            if (blocks, head) == ("16-bit", "none"):
                continue
            made = folder if head == "none" else options.work / f"{blocks}-{head}"
            error = None
            if not made.exists():
                report = quantize(
                    folder, made, recipe=recipe.replace(quantize_head=head), device=options.device,
                    progress=report_progress,
                )  # fmt: skip
                print(report.render(), file=sys.stderr)
            if head != "none":
                run = json.loads((made / "marlinq.json").read_text(encoding="utf-8"))["run"]
                error = run["module lm_head"]["relative_error"]
            result = measured(made, original, text, options)
            if not rows:
                rows.append({"blocks": "16-bit", "head": "none", "perplexity": result.against_perplexity})
            rows.append(
                {
                    "blocks": blocks,
                    "head": head,
                    "output_error": error,
                    "perplexity": result.perplexity,
                    "kl": result.kl,
                    "top1_agreement": result.top1_agreement,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    calibration = f"{recipe.samples} documents of up to {recipe.max_length} tokens, seed {recipe.seed}"
    lines = conditions(
        original,
        f"{options.model.name}: symmetric, group size {recipe.group_size}",
        f"calibrated on {options.calibration.name}: {calibration}",
        f"evaluated on {text.name}: {result.windows} windows of {options.length} tokens",
    )
    # Only the file name, because the path is this machine's.
    settings = {**recipe.to_dict(), "calibration": options.calibration.name}
    print("\n".join(lines))
    write_record(options.json, lines, rows, recipe=settings)


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__, work=Path("build/head"), group_size=64, samples=24, max_length=256, windows=8, length=512
    )
    parser.add_argument("--quantised", type=Path, required=True, help="MODEL with quantised blocks")
    add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
