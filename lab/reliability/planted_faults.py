"""Plant faults into copies of a quantised checkpoint and see what ``marlinq verify`` says about each.

    python -m lab.reliability.planted_faults CHECKPOINT ORIGINAL [--layout gptq] [--fault "swapped nibbles"]

CHECKPOINT is first converted to sharded folders of the layouts asked for, and these must verify clean.
Every fault goes into a fresh copy whose manifest, which has a hash of every tensor, is removed. The copy is
verified by itself and, if that finds nothing, ``--against ORIGINAL``. The table is Markdown.

The exit code is 0 only when clean folders pass without a warning about words and groups, every fault ends in
exit code 7, or in a warning where it is of a single word, and the damaged module, or the truncated file, is
named.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.errors import VerificationFailed
from marlinq.formats import LAYOUTS
from tests.testing import faults
from tests.testing.faults import SCALES, WORDS, ZEROS

SHARD_SIZE = "40MB"
"""So that there are several shards: some faults need two."""

Plant = Callable[[Path, str, str], None]
"""Called with the folder, the layout and the module to damage."""


def _change(suffixes: dict[str, str], edit: Callable[[Tensor], Tensor]) -> Plant:
    return lambda folder, layout, module: faults.change(folder, f"{module}.{suffixes[layout]}", edit)


def _unquantize(folder: Path, layout: str, module: str) -> None:
    faults.unquantize(folder, module, quantized(folder).load(module).dequantize(torch.float16))


G_IDX = {"gptq": "g_idx", "gptq-v2": "g_idx"}
FAULTS: dict[str, tuple[dict[str, str], Plant]] = {
    "swapped nibbles": (WORDS, _change(WORDS, faults.swap_nibbles)),
    "swapped nibbles in one word": (WORDS, _change(WORDS, faults.swap_nibbles_of_one_word)),
    "zeros one up": (ZEROS, _change(ZEROS, faults.shift_zeros(1))),
    "zeros one down": (ZEROS, _change(ZEROS, faults.shift_zeros(-1))),
    "transposed scales": (SCALES, _change(SCALES, faults.transpose_scales)),
    "shuffled g_idx": (G_IDX, _change(G_IDX, faults.swap_two_channels)),
    "flipped sign bit of a scale": (SCALES, _change(SCALES, faults.flip_bit(15))),
    "flipped top exponent bit of a scale": (SCALES, _change(SCALES, faults.flip_bit(14))),
    "flipped lowest exponent bit of a scale": (SCALES, _change(SCALES, faults.flip_bit(10))),
    "missing tensor": (
        SCALES,
        lambda folder, layout, module: faults.remove_tensor(folder, f"{module}.{SCALES[layout]}"),
    ),
    "duplicated tensor": (
        SCALES,
        lambda folder, layout, module: faults.duplicate_tensor(folder, f"{module}.{SCALES[layout]}"),
    ),
    "module left unquantised": (WORDS, _unquantize),
    "truncated shard": (WORDS, lambda folder, layout, module: faults.truncate_shard(folder)),
}
"""The tensor, by layout, that must be there for a fault to stand in it, and how the fault is planted."""


WARNED = {"swapped nibbles in one word"}
"""Faults of a single word: without a manifest they are warnings, with one they fail like any other."""


def verify(folder: Path, against: Path | None) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON report of ``marlinq verify``."""
    command = [sys.executable, "-m", "marlinq", "verify", str(folder), "--json"]
    command += ["--against", str(against)] if against else []
    result = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return result.returncode, json.loads(result.stdout)


def clean(folder: Path, layout: str, original: Path) -> bool:
    """Both verifications of an undamaged folder."""
    passed = True
    for label, against in (("alone", None), ("against the original", original)):
        code, report = verify(folder, against)
        checks = [check for check in report["checks"] if check["status"] == "passed"]
        warned = [check["name"] for check in report["checks"] if check["status"] == "warning"]
        verdict = f"{len(checks)} checks passed" + (f", warnings: {', '.join(warned)}" if warned else "")
        print(f"| {layout} | none | {label} | {code} | {verdict} |", flush=True)
        passed &= code == 0 and "words and groups" not in warned
    return passed


def damaged(folder: Path, layout: str, name: str, module: str, original: Path) -> bool:
    """Plant one fault into ``folder`` and verify it."""
    faulty = folder.with_name("faulty")
    faults.copy(folder, faulty, manifest=False)
    FAULTS[name][1](faulty, layout, module)
    label = "alone"
    code, report = verify(faulty, None)
    if code == 0:
        label = "against the original"
        code, report = verify(faulty, original)
    status, expected = ("warning", 0) if name in WARNED else ("failed", VerificationFailed.exit_code)
    failed = [check for check in report["checks"] if check["status"] == status]
    subject = "model-" if name == "truncated shard" else module
    named = any(subject in text for check in failed for text in (check["detail"], *check["problems"]))
    found = "; ".join(f"{check['name']}: {check['detail']}" for check in failed)
    found = re.sub(rf"{re.escape(str(faulty))}(/|: )", "", found)
    print(f"| {layout} | {name} | {label} | {code} | {found or 'NOT FOUND'} |", flush=True)
    shutil.rmtree(faulty)
    return code == expected and named


def sharded(checkpoint: Path, layout: str, out: Path) -> Path:
    """``checkpoint`` in another layout, or in its own by way of another, in several shards."""
    own = quantized(checkpoint).format.name
    steps = [layout] if layout != own else [next(name for name in LAYOUTS if name != own), layout]
    source = checkpoint
    for number, target in enumerate(steps):
        step = out if number == len(steps) - 1 else out.with_name("between")
        command = [sys.executable, "-m", "marlinq", "convert", "auto", "--to", target]
        command += [str(source), str(step), "--max-shard-size", SHARD_SIZE]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        if source != checkpoint:
            shutil.rmtree(source)
        source = step
    return out


def quantized(folder: Path) -> QuantizedCheckpoint:
    """An open quantised checkpoint."""
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    if found is None:
        raise SystemExit(f"{folder}: is not quantised")
    return found


def main() -> int:
    """Print the table as it grows."""
    arguments = _arguments()
    layouts = arguments.layout or list(LAYOUTS)
    print("| layout | fault | verified | exit code | found |")
    print("| --- | --- | --- | --- | --- |")
    good = True
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        for layout in layouts:
            folder = sharded(arguments.checkpoint, layout, Path(name) / layout)
            view = quantized(folder)
            module = sorted(view.modules)[len(view.modules) // 2]
            good &= clean(folder, layout, arguments.original)
            for fault in arguments.fault or FAULTS:
                suffix = FAULTS[fault][0].get(layout)
                if f"{module}.{suffix}" in view.checkpoint.tensors:
                    good &= damaged(folder, layout, fault, module, arguments.original)
            shutil.rmtree(folder)
    print(f"\n{'all as it should be' if good else 'NOT ALL AS IT SHOULD BE'}")
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("original", type=Path)
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="repeatable; default: all")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="repeatable; default: all")
    parser.add_argument("--work", type=Path, help="where to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
