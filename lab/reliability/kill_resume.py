"""Kill a quantise run with SIGKILL at random moments, resume it, and compare with an undisturbed run.

    python lab/reliability/kill_resume.py MODEL WORK_FOLDER --kills 10 --samples 8 --max-length 128

Each attempt starts afresh, dies at a moment drawn over the time that an undisturbed run spends on its folder,
and is resumed to the end. One line an attempt; exit code 0 only when all folders are equal in every byte.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    arguments = _arguments()
    arguments.work.mkdir(parents=True, exist_ok=True)
    whole = arguments.work / "whole"
    _remove(whole)
    _, length = _run(_command(arguments, whole, resume=False), whole, None)
    expected = _hashes(whole)
    print(f"undisturbed: {length:.1f} s on the folder, {len(expected)} files", flush=True)

    generator = random.Random(arguments.seed)
    equal = attempt = 0
    while attempt < arguments.kills:
        out = arguments.work / f"killed-{attempt + 1}"
        _remove(out)
        moment = generator.uniform(0, length)
        _run(_command(arguments, out, resume=False), out, moment)
        if out.exists():
            # This run was quicker than the first, so the blow came too late to count.
            print(f"    finished before {moment:.1f} s; drawing another moment", flush=True)
            length = min(length, moment)
            continue
        attempt += 1
        reached = _reached(out)
        _, again = _run(_command(arguments, out, resume=True), out, None)
        same = _hashes(out) == expected
        equal += same
        verdict = "equal" if same else "DIFFERENT"
        line = (
            f"killed after {moment:.1f} s with {reached} journal lines, resumed in {again:.1f} s: {verdict}"
        )
        print(f"{attempt:2d}: {line}", flush=True)
        if same:
            _remove(out)
    print(f"{equal} of {arguments.kills} equal")
    return 0 if equal == arguments.kills else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", default="self")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--group-size", default="64")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def _command(arguments: argparse.Namespace, out: Path, *, resume: bool) -> list[str]:
    options = {
        "--calibration": arguments.calibration,
        "--samples": arguments.samples,
        "--max-length": arguments.max_length,
        "--group-size": arguments.group_size,
        "--device": arguments.device,
    }
    flat = [str(part) for pair in options.items() for part in pair]
    command = [sys.executable, "-m", "marlinq", "quantize", arguments.model, str(out), *flat]
    return [*command, "--resume"] if resume else command


def _run(command: list[str], out: Path, moment: float | None) -> tuple[bool, float]:
    """Run to the end, or kill ``moment`` seconds after the folder appeared: (killed, seconds since then)."""
    partial = out.with_name(out.name + ".partial")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not partial.exists() and not out.exists():
            time.sleep(0.005)
        start = time.monotonic()
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True, time.monotonic() - start
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        return False, time.monotonic() - start


def _reached(out: Path) -> int:
    journal = out.with_name(out.name + ".partial") / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _remove(out: Path) -> None:
    for folder in (out, out.with_name(out.name + ".partial")):
        if folder.exists():
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
