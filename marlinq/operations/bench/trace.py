"""Profiles decode steps: the time of every GPU kernel, from torch's profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_NAME = 60


@dataclass(frozen=True)
class KernelShare:
    """One kernel of a step.

    Attributes:
        name: name of the kernel, without template arguments.
        launches: launches per step.
        seconds: seconds per step from start to end; overlapping kernels count fully.
        share: share of the sum over all kernels (0 to 1).
    """

    name: str
    launches: float
    seconds: float
    share: float


@dataclass(frozen=True)
class StepProfile:
    """The kernels of a decode step.

    Attributes:
        kernels: kernels, the longest first.
        span_seconds: seconds per step from the first kernel's start to the last one's end.
        busy_seconds: seconds per step in which at least one kernel ran.
        trace: path of the trace file, for a viewer such as Perfetto.
    """

    kernels: tuple[KernelShare, ...]
    span_seconds: float
    busy_seconds: float
    trace: str


def profile_steps(run: Callable[[], None], steps: int, path: Path) -> StepProfile:
    """Profiles ``run``, which makes ``steps`` decode steps on the current GPU, and writes a trace to
    ``path``.

    The profiler slows the host but not the kernels of a replayed graph.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    spans = [
        (str(event.name), event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and event.time_range.end > event.time_range.start
    ]
    return summarise(spans, steps, str(path))


def summarise(spans: list[tuple[str, float, float]], steps: int, trace: str) -> StepProfile:
    """The profile of ``steps`` steps from kernels (name, start, end) in microseconds."""
    sums: dict[str, list[float]] = defaultdict(list)
    for name, start, end in spans:
        sums[_short(name)].append(end - start)
    total = sum(sum(times) for times in sums.values()) or 1.0
    kernels = [
        KernelShare(name, len(times) / steps, sum(times) / steps * 1e-6, sum(times) / total)
        for name, times in sums.items()
    ]
    busy, reached = 0.0, float("-inf")
    for _, start, end in sorted(spans, key=lambda one: one[1]):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = max((end for _, _, end in spans), default=0.0) - min((start for _, start, _ in spans), default=0.0)
    return StepProfile(
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        span_seconds=span / steps * 1e-6,
        busy_seconds=busy / steps * 1e-6,
        trace=trace,
    )


def _short(name: str) -> str:
    plain = re.sub(r"^void ", "", name)
    plain = plain.split("<", 1)[0].split("(", 1)[0]
    return plain[:_NAME] or name[:_NAME]
