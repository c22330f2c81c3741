"""Everything that needs a GPU, in one go: tests, sanitizers, measurements.

    python lab/kernels/gpu_checks.py OUT                        all of it
    python lab/kernels/gpu_checks.py OUT --piece fuzz --piece memcheck
    python lab/kernels/gpu_checks.py OUT --without bench-llama-3-70b --within 560

Pieces that only check run side by side, the timed ones alone after them. A piece that fails or exceeds its
limit does not stop the others. OUT gets NAME.log of every piece, NAME.json of those that measure, and
summary.json. Exits with 1 unless everything that was asked for succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LAB = ROOT / "lab" / "kernels"
_TOOLKIT = Path("/usr/local/cuda/bin")
_GRACE_SECONDS = 5


@dataclass(frozen=True)
class Piece:
    """One command of the session.

    Attributes:
        name: name of its files, and of the piece for ``--piece``.
        command: arguments of the interpreter; ``{json}`` is replaced by the path for its figures.
        limit: seconds after which it is stopped.
        timed: whether it must run alone on the machine.
        prints_json: whether its standard output is its figures.
        tool: program to run it under; None for none.
        environment: further environment variables.
    """

    name: str
    command: tuple[str, ...]
    limit: int
    timed: bool = False
    prints_json: bool = False
    tool: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a piece ended: ``ok``, ``failed``, ``too long`` or ``not run``, and its last words."""

    name: str
    status: str
    seconds: float
    words: str


def _tests(name: str, files: Iterable[Path], limit: int, *, timed: bool = False) -> Piece:
    paths = [str(path.relative_to(ROOT)) for path in sorted(files)]
    which = "gpu and timed" if timed else "gpu and not timed"
    return Piece(
        name, ("-m", "pytest", "-q", "-m", which, "-p", "no:cacheprovider", *paths), limit, timed=timed
    )


def _sanitizer(tool: str, limit: int, problems: str = "small_problems") -> Piece:
    # Two of the tools misjudge the single launch; tests/kernels/small_steps.py says why.
    without = ("--no-single-launch",) if problems == "small_steps" and tool != "memcheck" else ()
    return Piece(
        tool if problems == "small_problems" else f"{tool}-{problems}",
        ("-m", f"tests.kernels.{problems}", *without),
        limit,
        tool=("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
        # Every tensor is then an allocation of its own, so that reading past one is seen.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def _sweep(kernel: str, batches: str, most: int) -> Piece:
    script = str(_LAB / "kernel_sweep.py")
    sizes = ("--model", "llama-3-8b", "--batch", batches, "--most", str(most), "--json", "{json}")
    return Piece(f"sweep-{kernel}", (script, "--kernel", kernel, *sizes), 300, timed=True)


def _bench(model: str) -> Piece:
    demands = ("--model", model, "--against", "cublas,humming", "--explain", "--json")
    command = ("-m", "marlinq", "bench", "kernels", *demands)
    return Piece(f"bench-{model}", command, 500, timed=True, prints_json=True)


def _experts() -> Piece:
    models = ("qwen3-30b-a3b", "qwen3.6-35b-a3b", "deepseek-v3-tp8", "mixtral-8x7b")
    named = [word for model in models for word in ("--model", model)]
    command = ("-m", "marlinq", "bench", "experts", *named, "--explain", "--json")
    return Piece("bench-experts", command, 400, timed=True, prints_json=True)


def pieces(checkpoint: Path | None) -> list[Piece]:
    """All pieces, in the order in which they are started; without a checkpoint not those that need one."""
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text("utf-8")
    ]
    timing = [path for path in marked if "pytest.mark.timed" in path.read_text("utf-8")]
    fuzz = ROOT / "tests" / "kernels" / "test_fuzz_gpu.py"
    rooms: dict[str, list[Path]] = {}
    for path in marked:
        if path != fuzz:
            rooms.setdefault("-".join(path.relative_to(ROOT / "tests").parts[:-1]), []).append(path)
    chain = str(_LAB / "decode_chain.py")
    return [
        _tests("tests-kernels", rooms.pop("kernels"), 300),
        _tests("fuzz", [fuzz], 180),
        _sanitizer("memcheck", 240),
        _sanitizer("racecheck", 240),
        _sanitizer("synccheck", 240),
        *(
            _sanitizer(tool, 240, problems)
            for problems in ("small_experts", "small_steps")
            for tool in ("memcheck", "racecheck", "synccheck")
        ),
        *(_tests(f"tests-{room}", files, 180) for room, files in sorted(rooms.items())),
        _tests("tests-timed", timing, 120, timed=True),
        Piece("host-cost", (str(_LAB / "host_cost.py"), "--json", "{json}"), 120, timed=True),
        Piece("chain", (chain, "--batch", "1", "--batch", "16", "--json"), 150, timed=True, prints_json=True),
        *(_bench(model) for model in ("llama-3-8b", "llama-3-70b")),
        _experts(),
        _sweep("stream", "1,16,32", 12),
        _sweep("bulk", "1,8,16", 40),
        _sweep("warpgroup", "8,16,32,64,128,256,1024,4096", 24),
        *([] if checkpoint is None else [_text(checkpoint)]),
    ]


def _text(checkpoint: Path) -> Piece:
    script = str(ROOT / "lab" / "quality" / "same_text.py")
    return Piece("text", (script, str(checkpoint.resolve()), "--json"), 240, prints_json=True)


class Session:
    """Runs pieces until ``deadline``, a time of :func:`time.monotonic`, and keeps their outcomes."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.out = out
        self.deadline = deadline
        self.outcomes: list[Outcome] = []

    def run(self, piece: Piece) -> None:
        """Run one piece to its end or its limit."""
        start = time.monotonic()
        limit = min(piece.limit, self.deadline - start)
        if limit <= 0:
            return self._ended(Outcome(piece.name, "not run", 0.0, "no time was left"))
        tool = [_program(piece.tool[0]), *piece.tool[1:]] if piece.tool else []
        if None in tool:
            return self._ended(Outcome(piece.name, "not run", 0.0, f"{piece.tool[0]} is not installed"))
        log, figures = self.out / f"{piece.name}.log", self.out / f"{piece.name}.json"
        arguments = [part.format(json=figures) for part in piece.command]
        with (
            log.open("wb") as words,
            (figures if piece.prints_json else Path(os.devnull)).open("wb") as printed,
        ):
            process = subprocess.Popen(
                [*filter(None, tool), sys.executable, *arguments],
                cwd=ROOT,
                env=_environment(piece),
                stdin=subprocess.DEVNULL,
                stdout=printed if piece.prints_json else words,
                stderr=words,
                process_group=0,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _stop(process)
        status = {0: "ok", None: "too long"}.get(code, "failed")
        return self._ended(Outcome(piece.name, status, time.monotonic() - start, _last_line(log)))

    def _ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(f"{outcome.status:8s} {outcome.name:18s} {outcome.seconds:6.1f} s  {outcome.words}", flush=True)
        listed = [asdict(outcome) for outcome in self.outcomes]
        (self.out / "summary.json").write_text(json.dumps(listed, indent=1), encoding="utf-8")


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(_TOOLKIT))


def _environment(piece: Piece) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **piece.environment}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the piece, its children too."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")


def main() -> int:
    names = [piece.name for piece in pieces(Path())]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for logs and figures")
    parser.add_argument("--piece", action="append", choices=names, help="repeatable; default: all")
    parser.add_argument("--without", action="append", choices=names, default=[], help="repeatable")
    parser.add_argument(
        "--checkpoint", type=Path, help="whose text to compare with a CPU's (the piece 'text')"
    )
    parser.add_argument("--within", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--together", type=int, default=3, help="checks to run side by side")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("error: nothing here says anything without a GPU", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [
        piece
        for piece in pieces(arguments.checkpoint)
        if piece.name in (arguments.piece or names) and piece.name not in arguments.without
    ]
    session = Session(arguments.out.resolve(), time.monotonic() + arguments.within)
    with ThreadPoolExecutor(arguments.together) as pool:
        list(pool.map(session.run, [piece for piece in chosen if not piece.timed]))
    for piece in chosen:
        if piece.timed:
            session.run(piece)
    bad = [outcome.name for outcome in session.outcomes if outcome.status != "ok"]
    print(
        f"{len(chosen) - len(bad)} of {len(chosen)} pieces succeeded"
        + (f"; not: {', '.join(bad)}" if bad else "")
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
