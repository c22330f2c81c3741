"""Times vLLM with and without marlinq's plugin: decode steps, first tokens, throughput.

The engines run one after the other, each in a process group of its own. The group is killed when its engine
has written its measurements, so that nothing holds the GPU's memory when the next engine starts.

An engine's process adds each measurement to one JSON file as soon as it is made (:meth:`ServeBench.to_dict`).
So an engine that fails, or an interruption, loses nothing, and a repeated run continues from that file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marlinq.core.display import Block, Shown, Table, lines
from marlinq.core.errors import EnvironmentProblem, UsageError
from marlinq.core.files import read_regular, replace_text
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.core.version import __version__
from marlinq.operations.bench import serve_engine

ENGINES = {"vLLM": "off", "vLLM with marlinq": "all"}
"""Name of an engine -> its value of ``MARLINQ_VLLM``."""
INTERRUPTED = "interrupted"
"""Value of :attr:`ServeBench.unfinished` after Ctrl-C or SIGTERM."""
_SAID = re.compile(r"Using \S+ for \S+|Using \S+ \S*MoE\S*|marlinq: [^\n]*|GPU KV cache size: [^\n]*")
# Runs the file without importing its package, which would import transformers and take seconds.
_MAIN = f"import runpy, sys; runpy.run_path({serve_engine.__file__!r})['main'](*sys.argv[1:])"
_SOURCE = Path(serve_engine.__file__).resolve().parents[3]  # the folder that holds the package
_LOG_SHOWN = 3000  # characters
_MOST_BYTES = 1 << 24  # of a file with measurements
# Wait for killed processes: the driver takes seconds to free their memory.
_POLLS, _POLL_SECONDS = 150, 0.2


@dataclass(frozen=True)
class Workload:
    """The work that both engines do.

    Attributes:
        checkpoint: path of the folder.
        batches: numbers of sequences decoded together.
        context: mean number of tokens in the cache at a timed step.
        prompts: numbers of prompts whose first tokens are timed together.
        prompt_tokens: tokens per prompt of ``prompts``.
        requests: number of requests in the mixed load; 0 leaves throughput out.
        repeats: timed runs of each batch, of which the median is reported; first tokens have five, and the
            mixed load has one.
        dtype: dtype of activations.
        gpus: GPUs that share the model by tensor parallelism.
    """

    checkpoint: str
    batches: tuple[int, ...] = (1, 4, 16, 64)
    context: int = 128
    prompts: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 2048
    requests: int = 256
    repeats: int = 3
    dtype: str = "bfloat16"
    gpus: int = 1


@dataclass(frozen=True)
class EngineTimes:
    """One engine's measurements.

    Attributes:
        versions: versions of vLLM and torch.
        device: name of the GPU.
        load_seconds: seconds to start the engine.
        step_seconds: batch -> seconds of a decode step.
        first_token_seconds: number of prompts -> seconds until all have their first token.
        tokens_per_second: new tokens a second under the mixed load; None where not measured.
        complete: whether the whole workload was measured.
        said: lines of vLLM's log about kernels and memory.
    """

    versions: str
    device: str
    load_seconds: float
    step_seconds: dict[str, float]
    first_token_seconds: dict[str, float]
    tokens_per_second: float | None
    complete: bool = False
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeBench(Shown):
    """Measurements of both engines on one workload.

    Attributes:
        workload: batches, prompts and requests that were run.
        engines: name in :data:`ENGINES` -> measurements; an engine that was not started is missing.
        unfinished: reason why measurements are missing; None where all were made.
    """

    workload: Workload
    engines: dict[str, EngineTimes]
    unfinished: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "marlinq": __version__}

    def rows(self) -> list[tuple[str, float | None, float | None, float | None]]:
        """(name, vLLM's value, value with marlinq, ratio of the second to the first) of each measurement;
        None for what is missing."""
        own, plugin = (self._values(engine) for engine in ENGINES)
        return [(name, value, plugin[name], _ratio(plugin[name], value)) for name, value in own.items()]

    def _values(self, engine: str) -> dict[str, float | None]:
        """Name of each measurement -> its value for an engine."""
        work, times = self.workload, self.engines.get(engine)
        steps = {} if times is None else times.step_seconds
        first = {} if times is None else times.first_token_seconds
        found = {f"ms a step, batch {batch}": _milliseconds(steps, batch) for batch in work.batches}
        for prompts in work.prompts:
            found[f"ms to first tokens, prompts {prompts}"] = _milliseconds(first, prompts)
        if work.requests:
            found[f"tokens/s, {work.requests} requests"] = None if times is None else times.tokens_per_second
        found["s to start"] = None if times is None else times.load_seconds
        return found

    def display(self) -> list[Block]:
        """The measurements side by side, and the kernels that vLLM's log names."""
        rows = tuple((name, *map(_shown, values)) for name, *values in self.rows())
        work = self.workload
        hardware = (
            f"{each.device}, {each.versions}, marlinq {__version__}, {work.dtype}, {work.gpus} GPU"
            for each in self.engines.values()
        )
        return [
            lines(work.checkpoint),
            Table(("", *ENGINES, "ratio"), rows, numbers=(1, 2, 3)),
            lines(
                f"steps: mean context {work.context}; first tokens: prompts of {work.prompt_tokens} tokens",
                # Two lines where a file was continued on another machine.
                *dict.fromkeys(hardware),
            ),
            *(
                lines(f"{name}:", *(f"  {line}" for line in times.said))
                for name, times in self.engines.items()
            ),
            *([] if self.unfinished is None else [lines(f"incomplete: {self.unfinished}")]),
        ]


def _milliseconds(seconds: dict[str, float], key: int) -> float | None:
    value = seconds.get(str(key))
    return None if value is None else 1e3 * value


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def bench_serve(
    workload: Workload,
    progress: ReportProgress = no_progress,
    out: str | os.PathLike[str] | None = None,
) -> ServeBench:
    """Time vLLM's offline engine with its own kernels and with marlinq's.

    Args:
        workload: the checkpoint, and what to time.
        progress: called before each engine.
        out: file for the measurements as JSON, rewritten after each. Engines that it has whole, for the same
            workload, are not run again.

    Returns:
        The measurements; those made so far where an engine ended early or Ctrl-C came.

    Raises:
        EnvironmentProblem: vLLM is not installed, or an engine ended early and nothing was measured; the
            message ends with its log.
        KeyboardInterrupt: Ctrl-C came before the first measurement.
        UsageError: the context is too short for the timed steps, the checkpoint is no folder, or ``out`` is
            another file.
        OSError: ``out`` can't be written.
    """
    least = (serve_engine.SHORT + serve_engine.LONG) // 2
    if workload.context <= least:
        raise UsageError(f"--context {workload.context}: expected more than {least}")
    if not Path(workload.checkpoint).is_dir():
        raise UsageError(f"{workload.checkpoint}: is not a folder; bench serve needs a local checkpoint")
    if find_spec("vllm") is None:
        raise EnvironmentProblem("vLLM is not installed here; install it beside marlinq: pip install vllm")
    with tempfile.TemporaryDirectory(prefix="marlinq-serve-") as name:
        folder = Path(name)
        kept = folder / "times.json" if out is None else Path(out).absolute()
        report = _kept(kept, workload) if kept.exists() else ServeBench(workload, {})
        for number, (engine, mode) in enumerate(ENGINES.items()):
            progress(engine, number, len(ENGINES))
            if engine in report.engines and report.engines[engine].complete:
                continue
            others = {key: each for key, each in report.engines.items() if key != engine}
            replace_text(kept, json.dumps(ServeBench(workload, others, f"{engine} is running").to_dict()))
            report = _timed(engine, mode, workload, kept, folder)
            if report.unfinished is not None:
                break
    progress("both engines", len(ENGINES), len(ENGINES))
    if report.engines or report.unfinished is None:
        return report
    if report.unfinished == INTERRUPTED:
        raise KeyboardInterrupt
    raise EnvironmentProblem(report.unfinished)


def _kept(file: Path, workload: Workload) -> ServeBench:
    """The measurements that ``file`` holds.

    Raises:
        UsageError: the file holds something else, or measurements of another workload or version.
    """
    try:
        found = json.loads(read_regular(file, _MOST_BYTES))
        engines = {name: _times(found["engines"][name]) for name in ENGINES if name in found["engines"]}
        same = found["workload"] == json.loads(json.dumps(asdict(workload)))
        if same and found["marlinq"] == __version__:
            return ServeBench(workload, engines, found["unfinished"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    raise UsageError(
        f"{file}: expected measurements of the same checkpoint, options and version to continue; "
        "name another file, or delete it"
    )


def _times(found: dict[str, Any]) -> EngineTimes:
    """An engine's measurements from plain values."""
    rate = found["tokens_per_second"]
    steps, first = (
        {str(key): float(value) for key, value in found[kind].items()}
        for kind in ("step_seconds", "first_token_seconds")
    )
    return EngineTimes(
        *(str(found["versions"]), str(found["device"]), float(found["load_seconds"]), steps, first),
        tokens_per_second=None if rate is None else float(rate),
        complete=found["complete"] is True,
        said=tuple(map(str, found.get("said", ()))),
    )


def _timed(engine: str, mode: str, workload: Workload, kept: Path, folder: Path) -> ServeBench:
    """Run one engine, which adds its measurements to the file ``kept``; returns what the file then holds.

    ``folder`` is for temporary files.
    """
    request, log = folder / "request.json", folder / "log"
    request.write_text(json.dumps({"workload": asdict(workload), "engine": engine}), encoding="utf-8")
    unfinished = None
    environment = {"MARLINQ_VLLM": mode}
    if Path(os.path.realpath("")) != _SOURCE:
        # Neither the process nor its children import what lies in the current folder.
        environment["PYTHONSAFEPATH"] = "1"
    try:
        returned = run_alone([sys.executable, "-c", _MAIN, str(request), str(kept)], environment, log)
    except KeyboardInterrupt:
        returned, unfinished = 0, INTERRUPTED
    text = log.read_text(encoding="utf-8", errors="replace")
    report = _kept(kept, workload)
    times = report.engines.get(engine)
    if unfinished is None and (returned != 0 or times is None or not times.complete):
        unfinished = f"{engine} ended with {returned}; the end of its log:\n{text[-_LOG_SHOWN:]}"
    engines = report.engines
    if times is not None:
        engines = engines | {engine: replace(times, said=tuple(dict.fromkeys(_SAID.findall(text))))}
    report = ServeBench(workload, engines, unfinished)
    replace_text(kept, json.dumps(report.to_dict(), indent=1) + "\n")
    return report


def run_alone(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Runs ``command`` in a process group of its own, kills processes that it leaves, returns its exit
    status.

    Raises:
        KeyboardInterrupt: Ctrl-C, or a request to terminate this process, which would leave the group behind.
    """
    with log.open("wb") as sink, _termination_interrupts():
        child = subprocess.Popen(
            command, env=os.environ | environment, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            return child.wait()
        finally:
            # The engine's child processes are in the group and hold GPU memory until they end.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                for _ in range(_POLLS):
                    os.killpg(child.pid, 0)
                    time.sleep(_POLL_SECONDS)
            child.wait()


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
