"""The cost of each scheme for a model: mean KL divergence from the original, beside bits a weight.

    python -m lab.quality.schemes MODEL --calibration FILE --text FILE [--row NAME] [--json OUT]

Quantises MODEL once a row with the product's defaults, as compressed-tensors, and evaluates it in float32.
Activations stay in 16 bits or more. Prints a Markdown table, a row when it is measured; a column a text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from lab.quality.measuring import add_json, add_rows, conditions, measured, parser_of, write_record
from marlinq import load, quantize
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize.recipe import Recipe

ROWS: dict[str, dict[str, Any]] = {
    "int4-128": {"group_size": 128},
    "int4-64": {"group_size": 64},
    "int4-32": {"group_size": 32},
    "mxfp8": {"scheme": "mxfp8"},
    "mxfp4": {"scheme": "mxfp4"},
    "mxfp4-rtn": {"scheme": "mxfp4", "method": "rtn"},
    "nvfp4": {"scheme": "nvfp4"},
    "nvfp4-rtn": {"scheme": "nvfp4", "method": "rtn"},
    "int8": {"scheme": "int8", "group_size": "auto"},
    "fp8": {"scheme": "fp8"},
    "fp8-block": {"scheme": "fp8-block"},
}
"""By folder: what differs in a row's recipe."""


def main() -> None:
    """Quantise, evaluate, print a table."""
    options = _options()
    base = {
        "format": "compressed-tensors",
        "calibration": str(options.calibration),
        "samples": options.samples,
        "max_length": options.max_length,
    }
    options.work.mkdir(parents=True, exist_ok=True)
    original = load(options.model, device=options.device, dtype="float32", progress=False)
    lines = conditions(
        original,
        f"{options.model.name}; {options.samples} calibration documents of up to {options.max_length} tokens",
        f"evaluated on {options.windows} windows of {options.length} tokens",
    )
    rows = []
    titles = ["KL", "bits a weight", *(text.stem for text in options.text)]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)
    for name in options.rows or ROWS:
        folder, began = options.work / name, time.perf_counter()
        if not folder.exists():
            recipe = Recipe.from_dict({**base, **ROWS[name]})
            quantize(options.model, folder, recipe=recipe, device=options.device, progress=False)
        seconds = time.perf_counter() - began
        bits = inspect(folder, progress=False).linear_bits
        cells = [name, f"{bits:.2f}"]
        for text in options.text:
            result = measured(folder, original, text, options)
            row = {"row": name, "bits": bits, "text": text.name, "kl": result.kl, "seconds": seconds}
            rows.append({**row, "top1_agreement": result.top1_agreement})
            cells.append(f"{result.kl:.4f}")
        print(f"| {' | '.join(cells)} |", flush=True)
        write_record(options.json, lines, rows)
    print("\n" + "\n".join(lines))


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__, work=Path("schemes"), samples=32, max_length=512, windows=16, length=512, device="cpu"
    )
    add_rows(parser, ROWS)
    add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
