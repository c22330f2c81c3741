"""Measures the cost of a quantised output head: 16, 8 and 4 bits, with blocks in 16 and in 4 bits.

    python lab/quality/output_head.py MODEL QUANTISED --calibration FILE --text FILE
        [--work FOLDER] [--json OUT]

QUANTISED is MODEL with quantised blocks and a head in 16 bits. The head is quantised last and changes no
block, so one set of blocks serves all heads: QUANTISED is dequantised, and every head is made by the quantise
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

from marlinq import evaluate, load, quantize
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe

BLOCKS = r"\.\d+\."
"""Regular expression that matches the name of every linear in a block."""


def main() -> None:
    """Quantise heads, evaluate, print a table."""
    options = _options()
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
                    progress=_report_progress,
                )  # fmt: skip
                print(report.render(), file=sys.stderr)
            if head != "none":
                run = json.loads((made / "marlinq.json").read_text(encoding="utf-8"))["run"]
                error = run["module lm_head"]["relative_error"]
            measured = evaluate(
                made,
                against=original,
                text=str(options.text),
                windows=options.windows,
                length=options.length,
                device=options.device,
                dtype="float32",
                progress=_report_progress,
            )
            if not rows:
                rows.append({"blocks": "16-bit", "head": "none", "perplexity": measured.against_perplexity})
            rows.append(
                {
                    "blocks": blocks,
                    "head": head,
                    "output_error": error,
                    "perplexity": measured.perplexity,
                    "kl": measured.kl,
                    "top1_agreement": measured.top1_agreement,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    calibration = f"{recipe.samples} documents of up to {recipe.max_length} tokens, seed {recipe.seed}"
    lines = [
        hardware_line(original.device),
        f"{options.model.name}: symmetric, group size {recipe.group_size}",
        f"calibrated on {options.calibration.name}: {calibration}",
        f"evaluated on {options.text.name}: {measured.windows} windows of {options.length} tokens",
    ]
    # Only the file name, because the path is this machine's.
    settings = {**recipe.to_dict(), "calibration": options.calibration.name}
    record = {"conditions": lines, "recipe": settings, "rows": rows}
    print(json.dumps(record, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _report_progress(stage: str, done: int, total: int) -> None:
    if done % 8 == 0 or done == total:
        print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("quantised", type=Path, help="the same model with quantised blocks")
    parser.add_argument("--calibration", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--text", type=Path, required=True, help="text to evaluate on")
    parser.add_argument("--work", type=Path, default=Path("build/head"), help="where checkpoints go")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
