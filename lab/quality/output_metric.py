"""GPTQ that minds the loss's gradients at a layer's outputs, with other constants than the package's.

    python lab/quality/output_metric.py MODEL WORK --calibration FILE --text FILE --try 'parts=8 damp=.03'

Keys of a try: minds (0: as the default does), parts (at most), damp, shrink, draws (labels of a token, at
most), tokens (that gradients are taken on, at most), keep (1 leaves WORK/TRY there).
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from marlinq import evaluate, load, quantize
from marlinq.methods import outputs
from marlinq.operations.quantize import budget
from marlinq.operations.quantize.recipe import Recipe


def main() -> None:
    """Quantise with every try, measure."""
    options = _options()
    recipe = Recipe(
        group_size=options.group_size,
        calibration=str(options.calibration),
        samples=options.samples,
        max_length=options.max_length,
        seed=options.seed,
    )
    original = load(options.model, device=options.device, dtype="float32")
    for number, text in enumerate(options.tries):
        asked = dict(part.split("=") for part in text.split())
        outputs._MOST_PARTS = int(asked.get("parts", 16))
        outputs._DAMP, outputs._SHRINKAGE = float(asked.get("damp", 0.1)), float(asked.get("shrink", 0.25))
        budget._GRADIENT_DRAWS = int(asked.get("draws", 4))
        budget._GRADIENT_TOKENS = int(asked.get("tokens", 1 << 16))
        out = options.work / f"try{number}"
        start = time.perf_counter()
        minding = recipe.replace(output_hessian=bool(int(asked.get("minds", 1))))
        quantize(options.model, out, recipe=minding, device=options.device)
        lines: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 1)}
        for spelling in options.text:
            name, _, windows = spelling.partition(":")
            found = evaluate(
                out,
                against=original,
                text=name,
                windows=int(windows or 8),
                length=1024,
                device=options.device,
                dtype="float32",
            )
            lines[Path(name).stem] = [found.kl, found.top1_agreement]
        print(text, "|", json.dumps(lines), flush=True)
        if not int(asked.get("keep", 0)):
            shutil.rmtree(out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True, help="FILE or FILE:WINDOWS")
    parser.add_argument("--try", dest="tries", action="append", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
