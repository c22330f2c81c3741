"""Measures the time of a quantise run of Llama 3's shape, disk to disk, and its parts.

    python lab/quality/quantize_time.py FOLDER --layers 8 [--samples 128 --max-length 2048 --device cuda]
    torchrun --nproc-per-node 2 lab/quality/quantize_time.py FOLDER --layers 8    # after the first

Writes a random checkpoint and a text into FOLDER unless they are there, quantises it, and prints seconds from
start to end, per block, and the peaks of memory. Blocks are alike, so the seconds of 32 follow from those of
a few: whole run less blocks, plus 32 times a block.

The peak of host memory is that of the process, which is the checkpoint's making where it is made: run it
twice.

With --split the parts of a block are timed, on every rank, and the device is waited for at the end of each,
which takes a little longer altogether. What ranks wait for each other is in the parts that add up and share.
With --profile Python's profiler tells where the host's time goes.

Figures in docs/results.md: one or two H200s, CUDA 13.0, torch 2.11.0, transformers 5.17.0, 32 cores.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import random
import shutil
import string
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from random_checkpoint import write_original  # type: ignore[import-not-found]

from marlinq import quantize
from marlinq.checkpoint import CheckpointWriter, CopyBehind
from marlinq.core.devices import rank_and_size
from marlinq.models import ModelInstance
from marlinq.operations.quantize import Recipe, blocks, solves
from marlinq.operations.quantize.blocks import BlockQuantizer
from marlinq.operations.quantize.gathering import Gathering
from marlinq.operations.quantize.module_writer import ModuleWriter
from marlinq.operations.quantize.ranks import Ranks


def write_text(path: Path, documents: int, words: int) -> None:
    """Paragraphs of random words."""
    generator = random.Random(0)
    lines = [
        " ".join("".join(generator.choices(string.ascii_letters, k=8)) for _ in range(words))
        for _ in range(documents)
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


PARTS = {
    "block read and placed": (ModelInstance, "block"),
    "first forward pass and Hessians": (Gathering, "gather"),
    "inputs behind quantised projections": (Gathering, "gather_late"),
    "added up over the ranks": (solves, "add_up"),
    "solve": (BlockQuantizer, "_solve"),
    "results shared by the ranks": (Ranks, "share_weight"),
    "packed": (ModuleWriter, "add"),
    "waited for the writer": (ModuleWriter, "commit"),
    "new weights in place": (blocks, "install"),
    "second forward pass": (BlockQuantizer, "_advance"),
    "first hidden states": (blocks, "first_states"),
    "waited for the copies": (CopyBehind, "finish"),
    "end of the folder": (CheckpointWriter, "finish"),
}
"""Timed methods, none of which calls another."""


def split_into(parts: dict[str, float]) -> None:
    """Makes the methods of :data:`PARTS` add their seconds to ``parts``."""

    def timed(part: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.monotonic()
            result = method(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            name = part
            if part == "solve":
                # Modules that are solved together are named by the first.
                name += f" {args[1][0].projection.name.rpartition('.')[2]}"
            parts[name] = parts.get(name, 0.0) + time.monotonic() - start
            return result

        return run

    for part, (owner, name) in PARTS.items():
        setattr(owner, name, timed(part, getattr(owner, name)))


def main() -> None:
    """Write what is missing, quantise, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--recipe", type=json.loads, default={}, help="changes of the recipe, as JSON")
    arguments = parser.parse_args()
    model, text = arguments.folder / f"original-{arguments.layers}", arguments.folder / "text.txt"
    rank, size = rank_and_size()
    if not model.exists() and rank == 0:
        start = time.monotonic()
        unfinished = model.with_suffix(".unfinished")
        nbytes = write_original(unfinished, layers=arguments.layers)
        unfinished.rename(model)
        print(f"wrote {nbytes / 1e9:.2f} GB in {time.monotonic() - start:.1f} s", flush=True)
    if not text.exists() and rank == 0:
        # A word and its blank are nine bytes, a token at most three.
        write_text(text, max(128, arguments.samples), arguments.max_length // 2)
    while not (model.exists() and text.exists()):
        time.sleep(0.2)
    out = arguments.folder / f"quantized-{size}"
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
    recipe = Recipe(
        calibration=str(text), samples=arguments.samples, max_length=arguments.max_length
    ).replace(**arguments.recipe)
    marks: list[tuple[float, str, int]] = []
    start = time.monotonic()

    def note(stage: str, done: int, total: int) -> None:
        at = time.monotonic() - start
        told = stage in ("tuning", "running the original", "varying the text")
        if told and (done in (1, total) or done % 20 == 0):
            # At once: a run that is stopped has told how far it came.
            print(f"{at:8.2f} s: {stage} {done} of {total}", flush=True)
        marks.append((at, stage, done))

    parts: dict[str, float] = {}
    if arguments.split:
        split_into(parts)
    profiler = cProfile.Profile()
    if arguments.profile:
        profiler.enable()
    report = quantize(model, out, recipe=recipe, device=arguments.device, progress=note)
    profiler.disable()
    seconds = time.monotonic() - start
    for part, took in parts.items():
        line = f"{part:36s} {took:7.2f} s, {took / arguments.layers:.3f} a block"
        print(line if size == 1 else f"rank {rank}: {line}", flush=True)
    if rank:
        return
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
    for stage in dict.fromkeys(stage for _, stage, _ in marks):
        ends = [at for at, name, _ in marks if name == stage]
        if stage != "quantising blocks" and len(ends) > 1:
            each = sorted(b - a for a, b in itertools.pairwise(ends))
            middle, whole = each[len(each) // 2], ends[-1] - ends[0]
            print(f"{stage}: {len(ends)}, median {middle:.3f} s, {whole:.1f} s in all")
    if arguments.profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)
    peak = report.peak_device_bytes or 0
    print(f"peak host {report.peak_host_bytes / 1e9:.2f} GB, device {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
