"""Times vLLM with and without marlinq's plugin: decode steps, first tokens, throughput.

The engines run one after the other, each in a process group of its own. The group is killed when its engine
has written its measurements, so that nothing holds the GPU's memory when the next engine starts.
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
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marlinq.core.display import Block, Shown, Table, lines
from marlinq.core.errors import EnvironmentProblem, UsageError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.core.version import __version__
from marlinq.operations.bench import serve_engine

ENGINES = {"vLLM": "off", "vLLM with marlinq": "all"}
"""Name of an engine -> its value of ``MARLINQ_VLLM``."""
_SAID = re.compile(r"Using \S+ for \S+|Using \S+ \S*MoE\S*|marlinq: [^\n]*|GPU KV cache size: [^\n]*")
# Runs the file without importing its package, which would import transformers and take seconds.
_MAIN = f"import runpy, sys; runpy.run_path({serve_engine.__file__!r})['main'](*sys.argv[1:])"
_LOG_SHOWN = 3000  # characters
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
        repeats: runs of which the median is reported.
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
        said: lines of vLLM's log about kernels and memory.
    """

    versions: str
    device: str
    load_seconds: float
    step_seconds: dict[str, float]
    first_token_seconds: dict[str, float]
    tokens_per_second: float | None
    said: tuple[str, ...]


@dataclass(frozen=True)
class ServeBench(Shown):
    """Measurements of both engines on one workload.

    Attributes:
        workload: batches, prompts and requests that were run.
        engines: name in :data:`ENGINES` -> measurements.
    """

    workload: Workload
    engines: dict[str, EngineTimes]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "marlinq": __version__}

    def rows(self) -> list[tuple[str, float, float, float]]:
        """(name, vLLM's value, value with marlinq, ratio of the second to the first) of each measurement."""
        own, plugin = self.engines.values()
        found = []
        for words, kind, scale in (
            ("ms a step, batch {}", "step_seconds", 1e3),
            ("ms to first tokens, prompts {}", "first_token_seconds", 1e3),
        ):
            for key, value in getattr(own, kind).items():
                other = getattr(plugin, kind)[key]
                found.append((words.format(key), scale * value, scale * other, other / value))
        if own.tokens_per_second and plugin.tokens_per_second:
            values = own.tokens_per_second, plugin.tokens_per_second
            found.append((f"tokens/s, {self.workload.requests} requests", *values, values[1] / values[0]))
        found.append(
            ("s to start", own.load_seconds, plugin.load_seconds, plugin.load_seconds / own.load_seconds)
        )
        return found

    def display(self) -> list[Block]:
        """The measurements side by side, and the kernels that vLLM's log names."""
        rows = tuple(
            (name, f"{own:,.2f}", f"{ours:,.2f}", f"{ratio:.2f}") for name, own, ours, ratio in self.rows()
        )
        first = next(iter(self.engines.values()))
        work = self.workload
        return [
            lines(work.checkpoint),
            Table(("", *self.engines, "ratio"), rows, numbers=(1, 2, 3)),
            lines(
                f"steps: mean context {work.context}; first tokens: prompts of {work.prompt_tokens} tokens",
                f"{first.device}, {first.versions}, marlinq {__version__}, {work.dtype}, {work.gpus} GPU",
            ),
            *(
                lines(f"{name}:", *(f"  {line}" for line in times.said))
                for name, times in self.engines.items()
            ),
        ]


def bench_serve(workload: Workload, progress: ReportProgress = no_progress) -> ServeBench:
    """Time vLLM's offline engine with its own kernels and with marlinq's.

    Args:
        workload: the checkpoint, and what to time.
        progress: called before each engine.

    Raises:
        EnvironmentProblem: vLLM is not installed, or an engine ended early; the message ends with its log.
        UsageError: the context is too short for the timed steps, or the checkpoint is no folder.
    """
    least = (serve_engine.SHORT + serve_engine.LONG) // 2
    if workload.context <= least:
        raise UsageError(f"--context {workload.context}: expected more than {least}")
    if not Path(workload.checkpoint).is_dir():
        raise UsageError(f"{workload.checkpoint}: not a folder; vLLM's engine is timed on a local checkpoint")
    if find_spec("vllm") is None:
        raise EnvironmentProblem("vLLM is not installed here; install it beside marlinq: pip install vllm")
    engines = {}
    for number, (name, mode) in enumerate(ENGINES.items()):
        progress(name, number, len(ENGINES))
        engines[name] = _timed(name, mode, workload)
    progress("both engines", len(ENGINES), len(ENGINES))
    return ServeBench(workload, engines)


def _timed(name: str, mode: str, workload: Workload) -> EngineTimes:
    with tempfile.TemporaryDirectory(prefix="marlinq-serve-") as folder:
        request, out, log = (Path(folder) / each for each in ("request.json", "times.json", "log"))
        request.write_text(json.dumps(asdict(workload)), encoding="utf-8")
        returned = run_alone(
            [sys.executable, "-c", _MAIN, str(request), str(out)], {"MARLINQ_VLLM": mode}, log
        )
        text = log.read_text(encoding="utf-8", errors="replace")
        if returned != 0 or not out.is_file():
            raise EnvironmentProblem(
                f"{name} ended with {returned}; the end of its log:\n{text[-_LOG_SHOWN:]}"
            )
        found = json.loads(out.read_text(encoding="utf-8"))
    return EngineTimes(**found, said=tuple(dict.fromkeys(_SAID.findall(text))))


def run_alone(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Runs ``command`` in a process group of its own, kills processes that it leaves, returns its exit
    status."""
    with log.open("wb") as sink:
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
