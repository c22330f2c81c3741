"""How long a conversion takes beside ``cp -r`` of the same folder, and how much memory it needs.

    python benchmarks/convert_vs_copy.py CHECKPOINT TARGET [--repeat 3] [--work FOLDER]

Each run is a process of its own, into a fresh folder, after the source was read once (warm page cache on both
sides). Prints the best wall-clock time and the peak resident memory of every command, with that of an idle
``import torch`` to subtract. Conversion makes its output durable (fsync) and hashes it; ``cp`` does neither.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """The best of several runs of one command."""

    name: str
    seconds: float
    peak_mb: float
    mb_per_s: float


def timed(command: list[str]) -> tuple[float, float]:
    """Wall-clock seconds and peak resident MB of ``command``."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return seconds, usage.ru_maxrss / 1024


def best(name: str, command: list[str], out: Path, repeat: int, megabytes: float) -> Run:
    """Run ``command``, which writes ``out``, ``repeat`` times."""
    results = []
    for _ in range(repeat):
        shutil.rmtree(out, ignore_errors=True)
        results.append(timed(command))
    shutil.rmtree(out, ignore_errors=True)
    seconds = min(seconds for seconds, _ in results)
    return Run(name, seconds, max(peak for _, peak in results), megabytes / seconds)


def main() -> None:
    """Parse, measure, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("target")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where to write; default: beside the checkpoint")
    options = parser.parse_args()
    source = options.checkpoint.resolve()
    megabytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file()) / 1e6
    with tempfile.TemporaryDirectory(dir=options.work or source.parent) as folder:
        out = Path(folder) / "out"
        timed(["cp", "-r", str(source), str(out)])
        convert = [sys.executable, "-m", "marlinq.cli", "convert", "auto", str(source), str(out)]
        runs = [
            best("cp -r", ["cp", "-r", str(source), str(out)], out, options.repeat, megabytes),
            best("import torch", [sys.executable, "-c", "import torch"], out, options.repeat, megabytes),
            best(
                f"convert to {options.target}",
                [*convert, "--to", options.target],
                out,
                options.repeat,
                megabytes,
            ),
        ]
    print(f"{source.name}: {megabytes:.0f} MB, {os.cpu_count()} cores")
    for run in runs:
        print(f"{run.name:<32}{run.seconds:>8.2f} s {run.mb_per_s:>8.0f} MB/s {run.peak_mb:>8.0f} MB peak")
    print(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main()
