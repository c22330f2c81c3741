"""Convert a checkpoint to every layout, and each result to every other: same values? how long? what memory?

    python lab/reliability/conversion_matrix.py CHECKPOINT [--repeat 3] [--work FOLDER]

Every conversion is a ``marlinq convert`` of its own, into a fresh folder, with the source in the page cache.
Afterwards the codes, scales, zero points and g_idx of all modules are compared with those of CHECKPOINT. The
table is Markdown: the time of the whole command, that of the conversion alone (without Python's imports), and
peak resident memory. ``cp -r`` stands below it, and ``cp -r`` with ``sync``: conversion makes its output
durable and hashes it, a plain ``cp`` does neither.

The exit code is 0 only when every conversion was bit-identical, or refused with exit code 5 leaving nothing
behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.errors import ConversionRefused
from marlinq.formats import LAYOUTS


@dataclass(frozen=True)
class Run:
    """One command: wall-clock seconds, peak resident MB, exit code, and what it printed."""

    seconds: float
    peak_mb: float
    code: int
    printed: bytes


def run(command: list[str]) -> Run:
    """Run ``command`` to its end."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return Run(seconds, usage.ru_maxrss / 1024, process.returncode, output.read())


def fastest(command: list[str], out: Path, repeat: int) -> Run:
    """The fastest of several runs of a command that writes ``out``; the last run's output stays."""
    runs = []
    for _ in range(repeat):
        if out.exists():
            shutil.rmtree(out)
        runs.append(run(command))
    return min(runs, key=lambda each: each.seconds)


def tuples(folder: Path) -> dict[str, str]:
    """A hash of the neutral tuple of every module; scales count by value, whatever their width on disk."""
    quantized = _quantized(folder)
    found = {}
    for name in quantized.modules:
        q = quantized.load(name)
        digest = hashlib.sha256(f"{q.element.name} {q.channels_per_group}".encode())
        for part in (q.codes, q.scales.to(torch.float32), q.zeros, q.g_idx):
            digest.update(repr(tuple(part.shape)).encode())
            digest.update(part.contiguous().numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


def compare(folder: Path, expected: dict[str, str]) -> str:
    """``identical``, or the first module that differs."""
    found = tuples(folder)
    differing = [name for name in expected if found.get(name) != expected[name]]
    if differing or set(found) != set(expected):
        name = (differing or sorted(set(found) - set(expected)))[0]
        return f"DIFFERENT in {len(differing)} modules, first {name}"
    return "identical"


def refusal(result: Run, source: Path, out: Path) -> str:
    """The reason of a refusal, or what is wrong with it."""
    message = str(json.loads(result.printed)["error"]).removeprefix(f"{source}: ")
    if result.code != ConversionRefused.exit_code:
        return f"FAILED with exit code {result.code}: {message}"
    left = sorted(path.name for path in out.parent.glob(f"{out.name}*"))
    return f"LEFT {left[0]} BEHIND" if left else f"refused: {message}"


def main() -> int:
    """Measure, and print the table as it grows."""
    arguments = _arguments()
    source = arguments.checkpoint.resolve()
    first = _quantized(source).format.name
    expected = tuples(source)
    megabytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file()) / 1e6
    print(f"{source.name}: {first}, {len(expected)} modules, {megabytes:.1f} MB\n")
    print("| from | to | command, s | conversion, s | MB/s | peak MB | result |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    good = True
    with tempfile.TemporaryDirectory(dir=arguments.work or source.parent) as name:
        work = Path(name)
        reached = {first: source}
        pairs = sorted(permutations(LAYOUTS, 2), key=lambda pair: pair[0] != first)
        for before, after in pairs:
            if before not in reached:
                continue
            out = work / f"{before}-to-{after}"
            command = [sys.executable, "-m", "marlinq", "convert", f"{before}-to-{after}"]
            result = fastest([*command, str(reached[before]), str(out), "--json"], out, arguments.repeat)
            if result.code:
                numbers, verdict = "| | | |", refusal(result, reached[before], out)
            else:
                seconds = json.loads(result.printed)["seconds"]
                numbers = f"{seconds:.2f} | {megabytes / seconds:.0f} | {result.peak_mb:.0f} |"
                verdict = compare(out, expected)
                if before == first:
                    reached[after] = out
                else:
                    shutil.rmtree(out)
            good &= verdict == "identical" or verdict.startswith("refused")
            print(f"| {before} | {after} | {result.seconds:.2f} | {numbers} {verdict} |", flush=True)
        print()
        for label, command in _baselines(source, work / "copy").items():
            result = fastest(command, work / "copy", arguments.repeat)
            print(f"{label}: {result.seconds:.2f} s, {megabytes / result.seconds:.0f} MB/s", flush=True)
    idle = fastest([sys.executable, "-c", "import torch"], work / "none", arguments.repeat)
    print(f"python -c 'import torch': {idle.seconds:.2f} s, peak {idle.peak_mb:.0f} MB")
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each command; the fastest counts")
    parser.add_argument("--work", type=Path, help="where to write; default: beside the checkpoint")
    return parser.parse_args()


def _baselines(source: Path, out: Path) -> dict[str, list[str]]:
    copy = 'cp -r "$0" "$1"'
    return {
        "cp -r": ["cp", "-r", str(source), str(out)],
        "cp -r, then sync": ["sh", "-c", f'{copy} && sync "$1"/*', str(source), str(out)],
    }


def _quantized(folder: Path) -> QuantizedCheckpoint:
    quantized = QuantizedCheckpoint.of(Checkpoint.open(folder))
    if quantized is None:
        raise SystemExit(f"{folder}: is not quantised")
    return quantized


if __name__ == "__main__":
    sys.exit(main())
