"""How long a quantise run of Llama 3's shape takes, disk to disk, and where the time goes.

    python lab/quality/quantize_time.py FOLDER --layers 8 [--samples 128 --max-length 2048 --device cuda]

Writes a random checkpoint and a text into FOLDER unless they are there, quantises it, and prints seconds from
start to end, per block, and the peaks of memory. Blocks are alike, so the seconds of 32 follow from those of
a few: whole run less blocks, plus 32 times a block.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import string
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from random_checkpoint import write_original

from marlinq import quantize
from marlinq.operations.quantize import Recipe


def write_text(path: Path, documents: int, words: int) -> None:
    """Paragraphs of random words."""
    generator = random.Random(0)
    lines = [
        " ".join("".join(generator.choices(string.ascii_letters, k=8)) for _ in range(words))
        for _ in range(documents)
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Write what is missing, quantise, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", type=json.loads, default={}, help="changes of the recipe, as JSON")
    arguments = parser.parse_args()
    model, text = arguments.folder / f"original-{arguments.layers}", arguments.folder / "text.txt"
    if not model.exists():
        start = time.monotonic()
        nbytes = write_original(model, layers=arguments.layers)
        print(f"wrote {nbytes / 1e9:.2f} GB in {time.monotonic() - start:.1f} s", flush=True)
    if not text.exists():
        # Every token is at least a third of a word.
        write_text(text, max(128, arguments.samples), arguments.max_length)
    out = arguments.folder / "quantized"
    shutil.rmtree(out, ignore_errors=True)
    recipe = Recipe(
        calibration=str(text), samples=arguments.samples, max_length=arguments.max_length
    ).replace(**arguments.recipe)
    marks: list[tuple[float, str, int]] = []
    start = time.monotonic()

    def note(stage: str, done: int, total: int) -> None:
        marks.append((time.monotonic() - start, stage, done))

    report = quantize(model, out, recipe=recipe, device=arguments.device, progress=note)
    seconds = time.monotonic() - start
    blocks = [at for at, stage, _ in marks if stage == "quantising blocks"]
    each = [b - a for a, b in itertools.pairwise(blocks)]
    steady = sorted(each)[len(each) // 2]
    around = seconds - (blocks[-1] - blocks[0])
    calibration = report.calibration or {}
    print(f"tokens {calibration.get('tokens')}, {report.dtype}, format {report.format}")
    print(
        f"whole run {seconds:.2f} s; before the first block {blocks[0]:.2f} s, after the last "
        f"{seconds - blocks[-1]:.2f} s"
    )
    print("blocks", " ".join(f"{value:.3f}" for value in each))
    print(f"median block {steady:.3f} s; 32 of them and the rest: {around + 32 * steady:.1f} s")
    peak = report.peak_device_bytes or 0
    print(f"peak host {report.peak_host_bytes / 1e9:.2f} GB, device {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
