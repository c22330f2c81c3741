"""Seeded mutations of tiny checkpoints against every command: ``python -m tests.fuzz.campaign``.

Every case copies a small checkpoint of one layout, damages it (header, index, config, tensors, tokenizer,
place) or disturbs the run (crash, race), runs commands in this process, a few in one of their own, and looks
at what came of it. A case that breaks one of the promises is a finding:

* ``traceback``: something other than one line and a known exit code;
* ``hang``: longer than the time limit;
* ``memory``: half a gigabyte more than any run before it;
* ``executed``: code of the folder was run;
* ``wrong``: a conversion that is not exact, a changed byte that ``verify`` passes under a manifest, a folder
  that ``verify`` passes and ``load`` or the safetensors library refuses, a verdict of ``inspect --for
  marlinq`` that is not what ``load`` does, a resumed run with other bytes;
* ``dirt``: an output that looks finished after a failure, a changed source, a file left beside them;
* ``text``: output that fakes lines, acts on a terminal, or is no JSON under ``--json``.

``MARLINQ_FUZZ_CASES`` and ``MARLINQ_FUZZ_SEED`` set how many and which; one case is repeated with
``MARLINQ_FUZZ_ONLY``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.checkpoint.source import SourceFile
from marlinq.cli import main
from marlinq.core.errors import MarlinqError
from marlinq.operations.convert import convert
from marlinq.runtime import load
from tests.fuzz.mutations import MARKER, MUTATIONS
from tests.testing.original_folders import folder_bytes
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized, save_tokenizer
from tests.testing.tiny_models import tiny_model

LAYOUTS = ("gptq", "gptq-v2", "awq", "marlin", "compressed-tensors")
AREAS = (*MUTATIONS, "crash", "race")
TIME_LIMIT = 60
MEMORY_LIMIT = 1 << 29
EXIT_CODES = (0, *(error.exit_code for error in MarlinqError.__subclasses__()))
_SHARD_BYTES = 60_000
_APART_EVERY = 250


class Hang(BaseException):
    """The time is over."""


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


@dataclass(frozen=True)
class Base:
    """A checkpoint that cases start from; ``manifest`` when our writer made it."""

    folder: Path
    layout: str
    manifest: bool


@dataclass
class Result:
    """Output of one run of a command."""

    code: int
    out: str
    err: str


@dataclass
class Finding:
    """A broken promise."""

    case: int
    kind: str
    what: str
    detail: str


@dataclass
class Tally:
    """Outcome of all cases."""

    cases: int = 0
    runs: int = 0
    areas: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def render(self) -> str:
        """A table of areas and outcomes, then every finding."""
        kinds = Counter(finding.kind for finding in self.findings)
        lines = [f"{self.cases} cases, {self.runs} runs"]
        lines += [f"  {area:<10} {count:>6}" for area, count in sorted(self.areas.items())]
        lines += [f"  {name:<22} {count:>6}" for name, count in sorted(self.outcomes.items())]
        names = ("traceback", "hang", "memory", "executed", "wrong", "dirt", "text")
        lines.append("findings: " + ", ".join(f"{kinds[name]} {name}" for name in names))
        lines += [f"case {f.case} {f.kind}: {f.what}\n{f.detail}" for f in self.findings]
        return "\n".join(lines)


def make_bases(folder: Path) -> list[Base]:
    """Every layout as the safetensors library writes it and as our writer does, one file and sharded; and a
    model that is not quantised."""
    bases = []
    for layout in LAYOUTS:
        theirs = folder / f"{layout}-library"
        quantizer = random_quantizer()
        save_quantized(
            theirs,
            tiny_model("llama"),
            layout,
            lambda n, w, q=quantizer: q(n, w) if len(w) % 64 == 0 else None,
        )
        save_tokenizer(theirs)
        bases.append(Base(theirs, layout, False))
    for source, layout in zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True):
        ours = folder / f"{layout}-own"
        convert(folder / f"{source}-library", ours, target_format=layout, max_shard_size=_SHARD_BYTES)
        bases.append(Base(ours, layout, True))
    plain = folder / "plain"
    save_plain(plain, tiny_model("llama"))
    save_tokenizer(plain)
    bases.append(Base(plain, "", False))
    return bases


class Campaign:
    """Cases over ``bases`` in ``scratch``; case ``n`` depends on the seed and ``n`` alone."""

    def __init__(self, scratch: Path, *, seed: int, apart_every: int = _APART_EVERY) -> None:
        self.scratch = scratch
        self.seed = seed
        self.apart_every = apart_every
        self.tally = Tally()
        self.bases = make_bases(scratch / "bases")
        self.text = scratch / "text.txt"
        # Letters only: the tiny model has no tokens for more.
        self.text.write_text("abcdefghij" * 40)

    def case(self, number: int) -> None:
        """Run one case and note what it breaks."""
        rng = Random(f"{self.seed}:{number}")
        area = AREAS[number % len(AREAS)]
        base = rng.choice(self.bases[:-1] if area in ("crash", "race", "tensors") else self.bases)
        home = self.scratch / f"case-{number}"
        home.mkdir()
        source = home / "source"
        shutil.copytree(base.folder, source)
        self.tally.cases += 1
        self.tally.areas[area] += 1
        _Case(self, number, rng, area, base, home, source).run()
        for path in home.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)
        shutil.rmtree(home)


class _Case:
    def __init__(
        self, campaign: Campaign, number: int, rng: Random, area: str, base: Base, home: Path, source: Path
    ) -> None:
        self.campaign, self.number, self.rng, self.area = campaign, number, rng, area
        self.base, self.home, self.source = base, home, source
        self.out = home / "out"
        self.what = f"{area} of {base.folder.name}"

    def run(self) -> None:
        if self.area == "crash":
            self.crash()
        elif self.area == "race":
            self.race()
        else:
            self.what += ": " + MUTATIONS[self.area](self.rng, self.source)
            self.commands()
        if (self.home / MARKER).exists():
            self.found("executed", "code of the folder was run")

    def found(self, kind: str, detail: str) -> None:
        self.campaign.tally.findings.append(Finding(self.number, kind, self.what, detail))

    # Commands on a damaged folder.

    def commands(self) -> None:
        before = _snapshot(self.source)
        apart = self.campaign.apart_every and self.number % self.campaign.apart_every == 0
        names = ["inspect", "verify", "convert"] if self.base.layout else ["inspect", "quantize"]
        names += self.rng.sample(["generate", "eval"], 1)
        verified = False
        for name in names:
            result = self.command(name, apart=bool(apart) and name == names[0])
            if result is None:
                continue
            if name == "verify":
                verified = result.code == 0
            if name in ("convert", "quantize"):
                self.check_output(name, result)
        refusal = self.load_refusal()
        if verified:
            self.check_verified(refusal)
        self.check_judged(refusal)
        if _snapshot(self.source) != before:
            self.found("dirt", "the source was changed")
        extra = {path.name for path in self.home.iterdir()} - {
            "source",
            "out",
            "out.partial",
            "secret",
            MARKER,
        }
        if extra:
            self.found("dirt", f"left behind: {sorted(extra)}")

    def arguments(self, name: str) -> list[str]:
        source = str(self.source)
        if name == "convert":
            target = self.rng.choice([layout for layout in LAYOUTS if layout != self.base.layout])
            return ["convert", f"{self.base.layout}-to-{target}", source, str(self.out)]
        if name == "quantize":
            return [
                "quantize",
                source,
                str(self.out),
                "--group-size",
                "32",
                "--samples",
                "2",
                "--max-length",
                "24",
                "--calibration",
                self.rng.choice(("self", str(self.campaign.text))),
                "--device",
                "cpu",
            ]
        if name == "generate":
            chat = self.rng.choice(([], ["--chat"]))
            return [
                "generate",
                source,
                "--prompt",
                "ab",
                "--max-new-tokens",
                "2",
                "--greedy",
                "--device",
                "cpu",
                *chat,
            ]
        if name == "eval":
            return [
                "eval",
                source,
                "--text",
                str(self.campaign.text),
                "--windows",
                "1",
                "--length",
                "16",
                "--device",
                "cpu",
            ]
        extra = ["--device", "cpu"] if name == "verify" else self.rng.choice(([], ["--modules"]))
        return [name, source, *extra]

    def command(self, name: str, *, apart: bool = False) -> Result | None:
        arguments = self.arguments(name)
        as_json = self.rng.random() < 0.3
        if as_json:
            arguments.append("--json")
        result = self.execute(arguments, apart=apart)
        if result is None:
            return None
        self.campaign.tally.outcomes[f"{name} {'ok' if result.code == 0 else f'exit {result.code}'}"] += 1
        self.check_text(arguments, result, as_json)
        return result

    def execute(self, arguments: list[str], *, apart: bool = False) -> Result | None:
        self.campaign.tally.runs += 1
        before = peak_bytes()
        result = _apart(arguments) if apart else run_here(arguments)
        grown = peak_bytes() - before
        if grown > MEMORY_LIMIT:
            self.found("memory", f"{' '.join(arguments)}: {grown / 1e6:.0f} MB more than any run before")
        if isinstance(result, Result):
            return result
        kind = "hang" if result.startswith("hang") else "traceback"
        self.found(kind, f"{' '.join(arguments)}\n{result}")
        return None

    def check_text(self, arguments: list[str], result: Result, as_json: bool) -> None:
        printed = result.out + result.err
        if any(not character.isprintable() and character not in "\n\t" for character in printed):
            self.found("text", f"{arguments}: what acts on a terminal: {printed[:300]!r}")
        if result.code not in EXIT_CODES:
            self.found("traceback", f"{arguments}: exit code {result.code}\n{result.err[-2000:]}")
        if as_json:
            try:
                json.loads(result.out)
            except ValueError:
                self.found("text", f"{arguments}: no JSON: {result.out[:300]!r}")
        elif result.code not in (0, 7) and "error: " not in result.err:
            self.found(
                "text", f"{arguments}: exit {result.code} without a line of error: {result.err[-300:]!r}"
            )

    def check_output(self, name: str, result: Result) -> None:
        if result.code != 0:
            if self.out.exists():
                self.found("dirt", f"{name} failed and left a folder that looks finished")
            return
        if name == "convert" and (difference := _difference(self.source, self.out)) is not None:
            self.found("wrong", f"not exact: {difference}")
        if (verified := self.execute(["verify", str(self.out), "--device", "cpu"])) is not None:
            self.campaign.tally.outcomes[f"output verify {'ok' if verified.code == 0 else 'failed'}"] += 1
            # A tokenizer that nobody can read is carried as it is.
            carried = self.area in ("tokenizer", "place") and verified.out.count("\nfailed") == 1
            if name == "quantize" and verified.code and not (carried and "failed   loads" in verified.out):
                self.found("wrong", f"quantize wrote what verify refuses: {verified.out[-1500:]}")

    def load_refusal(self) -> str | None:
        """Why ``load`` refuses the folder, or None."""
        try:
            with quiet(), limited():
                load(self.source, device="cpu")
        except (Exception, Hang) as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return None

    def check_verified(self, refusal: str | None) -> None:
        if self.base.manifest and self.what.endswith("tensors changed"):
            self.found("wrong", "verify passes a changed byte under a manifest")
        if refusal is not None:
            self.found("wrong", f"verify passes what load refuses: {refusal}")
            return
        try:
            for shard in Checkpoint.open(self.source).shards:
                with safe_open(self.source / shard, framework="pt"):
                    pass
        except Exception as error:  # noqa: BLE001
            self.found("wrong", f"verify passes what cannot be read: {type(error).__name__}: {error}")

    def check_judged(self, refusal: str | None) -> None:
        judged = self.execute(["inspect", str(self.source), "--for", "marlinq"])
        if judged is not None and (judged.code == 0) != (refusal is None):
            self.found("wrong", f"inspect --for marlinq gives {judged.code}; load: {refusal or 'loads it'}")

    # Runs that are disturbed.

    def crash(self) -> None:
        target = self.rng.choice([layout for layout in LAYOUTS if layout != self.base.layout])
        arguments = ["convert", f"{self.base.layout}-to-{target}", str(self.source), str(self.out)]
        arguments += ["--max-shard-size", f"{self.rng.choice((40, 60, 500))}KB"]
        whole = [*arguments[:3], str(self.home / "whole"), *arguments[4:]]
        if (result := self.execute(whole)) is None or result.code:
            return
        expected = folder_bytes(self.home / "whole")
        step = self.rng.randrange(60)
        with killing(step):
            killed = run_here(arguments) == "killed"
        self.what += f" killed at {step}" if killed else " not killed"
        tampered = self.tamper() if killed and self.rng.random() < 0.6 else ""
        self.what += f", {tampered}" if tampered else ""
        precious = self.home / "precious"
        if self.out.exists() and killed:
            # Killed between the rename and the last fsync: the folder is whole.
            if folder_bytes(self.out) != expected:
                self.found("wrong", "the folder of a killed run looks finished and is not")
            return
        if killed:
            result = self.execute(arguments)
            if result is None:
                return
            self.campaign.tally.outcomes[f"resume {'ok' if result.code == 0 else f'exit {result.code}'}"] += 1
            self.check_text(arguments, result, as_json=False)
            if result.code and not tampered:
                self.found("wrong", f"an interrupted run does not continue: {result.err}")
            if result.code:
                return
        if folder_bytes(self.out) != expected:
            checked = self.execute(["verify", str(self.out), "--device", "cpu"])
            if not tampered or (checked is not None and checked.code == 0):
                self.found("wrong", "the resumed run gave other bytes")
        if precious.exists() and precious.read_text() != "precious":
            self.found("dirt", "a foreign file was overwritten")

    def tamper(self) -> str:
        partial = self.out.with_name("out.partial")
        if not partial.exists():
            return ""
        names = sorted(path.name for path in partial.iterdir() if path.is_file())
        kind = self.rng.choice(("link", "pipe", "bytes", "foreign", "folder link"))
        (self.home / "precious").write_text("precious")
        if kind == "folder link":
            partial.rename(self.home / "moved")
            partial.symlink_to(self.home / "moved")
            return kind
        if kind == "foreign" or not names:
            (partial / "evil.py").write_text("raise SystemExit")
            return "foreign"
        name = self.rng.choice(names)
        path = partial / name
        if kind == "bytes":
            data = bytearray(path.read_bytes() or b"x")
            data[self.rng.randrange(len(data))] ^= 1
            path.write_bytes(bytes(data))
        else:
            path.unlink()
            if kind == "link":
                path.symlink_to(self.home / "precious")
            else:
                os.mkfifo(path)
        return f"{kind} {name}"

    def race(self) -> None:
        target = self.rng.choice([layout for layout in LAYOUTS if layout != self.base.layout])
        arguments = ["convert", f"{self.base.layout}-to-{target}", str(self.source), str(self.out)]
        shard = self.rng.choice(sorted(self.source.glob("*.safetensors")))
        kind = self.rng.choice(("in place", "time kept", "replaced", "truncated", "removed"))
        step = self.rng.randrange(1, 90)
        self.what += f": {kind} at read {step}"
        copied = self.home / "before"
        shutil.copytree(self.source, copied)
        changed = []

        def change() -> None:
            changed.append(step)
            _change(shard, kind, self.rng)

        with _at_read(step, change):
            result = self.execute(arguments)
        if result is None:
            return
        self.check_text(arguments, result, as_json=False)
        self.campaign.tally.outcomes[f"race {'ok' if result.code == 0 else f'exit {result.code}'}"] += 1
        if result.code == 0:
            if changed:
                self.found("wrong", "a source that changed while it was read was converted")
            elif (difference := _difference(copied, self.out)) is not None:
                self.found("wrong", f"not exact: {difference}")
        elif self.out.exists():
            self.found("dirt", "a failed conversion left a folder that looks finished")


def _change(path: Path, kind: str, rng: Random) -> None:
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1 - rng.randrange(len(data) // 2)] ^= 0x55
    if kind == "removed":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, status.st_size // 2)
    elif kind == "replaced":
        other = path.with_name("other.tmp")
        other.write_bytes(bytes(data))
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.rename(path)
    else:
        with path.open("r+b") as file:
            file.write(bytes(data))
        if kind == "time kept":
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextlib.contextmanager
def _at_read(step: int, act: Callable[[], None]) -> Iterator[None]:
    """``act`` runs just before the n-th read of a source file's tensors."""
    original, left = SourceFile.read_into, [step]

    def counted(self: SourceFile, buffer: memoryview, offset: int) -> bool:
        left[0] -= 1
        if left[0] == 0:
            act()
        return original(self, buffer, offset)

    SourceFile.read_into = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        SourceFile.read_into = original  # type: ignore[method-assign]


@contextlib.contextmanager
def killing(step: int) -> Iterator[None]:
    """The n-th call that changes the disk never happens, nor any after it."""
    names = ("pwrite", "fsync", "rename", "unlink", "ftruncate")
    originals = {name: getattr(os, name) for name in names}
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*args, **kwargs)

        return wrapped

    for name, call in originals.items():
        setattr(os, name, counted(call))
    try:
        yield
    finally:
        for name, call in originals.items():
            setattr(os, name, call)


@contextlib.contextmanager
def quiet() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        yield out, err


@contextlib.contextmanager
def native(stream: int) -> Iterator[Callable[[], str]]:
    """A function that gives what compiled code has printed on a stream of this process."""
    usual, caught = os.dup(stream), os.memfd_create("native")
    try:
        os.dup2(caught, stream)
        yield lambda: os.pread(caught, 1 << 20, 0).decode("utf-8", "replace")
    finally:
        os.dup2(usual, stream)
        os.close(usual)
        os.close(caught)


@contextlib.contextmanager
def limited(seconds: float = TIME_LIMIT) -> Iterator[None]:
    """A time limit; within another one, the outer one counts on afterwards."""

    def over(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, over)
    start = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - start)))


def run_here(arguments: list[str]) -> Result | str:
    """The result, ``killed``, ``hang``, or a traceback."""
    with quiet() as (out, err), native(1) as more_out, native(2) as more_err:
        try:
            with limited():
                main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            return Result(code, out.getvalue() + more_out(), err.getvalue() + more_err())
        except Killed:
            return "killed"
        except Hang:
            return f"hang: more than {TIME_LIMIT} s\n{traceback.format_exc()[-1500:]}"
        except BaseException:  # noqa: BLE001
            return traceback.format_exc()[-3000:]
    return "main returned"


def _apart(arguments: list[str]) -> Result | str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "marlinq", *arguments],
            capture_output=True,
            timeout=4 * TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"hang: more than {4 * TIME_LIMIT} s in a process of its own"
    err = done.stderr.decode(errors="replace")
    if "Traceback" in err:
        return err[-3000:]
    return Result(done.returncode, done.stdout.decode(errors="replace"), err)


def _difference(source: Path, out: Path) -> str | None:
    """Where the tuples and carried tensors of ``out`` are not those of ``source``."""
    try:
        mine, theirs = (QuantizedCheckpoint.of(Checkpoint.open(folder)) for folder in (source, out))
    except MarlinqError as error:
        return str(error)
    if mine is None or theirs is None or set(mine.modules) != set(theirs.modules):
        return "other modules"
    for name in mine.modules:
        if (difference := mine.load(name).difference(theirs.load(name))) is not None:
            return f"{name}: {difference}"
    for name in mine.passthrough:
        a, b = mine.checkpoint.tensor(name), theirs.checkpoint.tensor(name)
        if a.dtype != b.dtype or a.shape != b.shape or not _same_bytes(a, b):
            return name
    return None


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def peak_bytes() -> int:
    """The most memory this process has had; Linux counts kilobytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def run(cases: int, seed: int, *, only: int | None = None, apart_every: int = _APART_EVERY) -> Tally:
    """Run ``cases`` cases, or case ``only``, and return what came of them."""
    with tempfile.TemporaryDirectory(prefix="marlinq-fuzz-") as scratch:
        campaign = Campaign(Path(scratch), seed=seed, apart_every=apart_every)
        start = time.monotonic()
        for number in range(cases) if only is None else [only]:
            campaign.case(number)
            if sys.stderr.isatty() or (number + 1) % 100 == 0:
                found = len(campaign.tally.findings)
                line = f"{number + 1}/{cases} cases, {found} findings, {time.monotonic() - start:.0f} s"
                print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)
    return campaign.tally


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    chosen = os.environ.get("MARLINQ_FUZZ_ONLY")
    tally = run(
        int(os.environ.get("MARLINQ_FUZZ_CASES", "10000")),
        int(os.environ.get("MARLINQ_FUZZ_SEED", "0")),
        only=None if chosen is None else int(chosen),
    )
    print(tally.render())
    sys.exit(bool(tally.findings))
