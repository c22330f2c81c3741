"""Reports errors and remaining time during a long run, and stops it when a module's error is too large."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, mode
from typing import Any, Protocol

import torch
from torch import Tensor

from marlinq.core.errors import NumericsError
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.quantity import ErrorQuantity
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.quantize.batches_of_modules import in_module_batches
from marlinq.operations.quantize.clock import BLOCKS

FAR_ABOVE_RTN = 5.0
"""ratio of a module's weight error to round-to-nearest's above which the run stops and ``verify`` fails"""
_RECENT_BLOCKS = 8
"""blocks over which the seconds per block are averaged"""
SECONDS_BETWEEN = 15.0
"""seconds between two lines, at least"""


class Noted(Protocol):
    """The part of a writer that :class:`Watch` reads."""

    notes: dict[str, Any]


class Watch:
    """A progress callback that reports errors and remaining time after the first block, then every 15 s.

    Args:
        progress: callback that gets every report.
        message: callback that gets the lines.
        writer: writer whose notes hold a report for every quantised module, under ``module NAME``.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        progress: ReportProgress,
        message: ReportMessage,
        writer: Noted,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._message = message
        self._writer = writer
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_RECENT_BLOCKS + 1)
        self._known: set[str] | None = None
        self._said: float | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Takes a report, as :data:`~marlinq.core.progress.ReportProgress` does."""
        self._progress(stage, done, total)
        if stage != BLOCKS:
            return
        now = self._clock()
        self._ends.append(now)
        notes = {
            name.removeprefix("module "): note
            for name, note in list(self._writer.notes.items())
            if name.startswith("module ")
        }
        # Only errors of the most frequent quantity: those of outputs and of weights can't be compared.
        quantity = mode(note["quantity"] for note in notes.values()) if notes else ErrorQuantity.OUTPUTS
        errors = {
            name: float(note["relative_error"])
            for name, note in notes.items()
            if note["quantity"] == quantity
        }
        before, self._known = self._known, set(errors)
        if before is None or done == total:
            return
        new = {name: error for name, error in errors.items() if name not in before}
        if new and (self._said is None or now - self._said >= SECONDS_BETWEEN):
            self._said = now
            self._message(self._line(done, total, ErrorQuantity(quantity).label, errors, new))

    def _line(
        self, done: int, total: int, label: str, errors: Mapping[str, float], new: Mapping[str, float]
    ) -> str:
        seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        worst = max(new, key=lambda name: new[name])
        return (
            f"block {done} of {total}: {label} {median(errors.values()):.2e} median so far, "
            f"{new[worst]:.2e} in {worst}; {seconds:.1f} s a block, {duration(seconds * (total - done))} left"
        )


def duration(seconds: float) -> str:
    """Text such as ``40 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def stop_if_far_off(solved: Iterable[tuple[str, Tensor, QuantizedWeight]]) -> None:
    """Stops the run at a module whose weight error is far above round-to-nearest's.

    A calibrated method accepts larger weight errors for smaller output errors: 0.9 to 2.8 times
    round-to-nearest's weight error in sound runs. Beyond :data:`FAR_ABOVE_RTN` the statistics can't be right:
    there are too few tokens, or inputs overflow.

    Args:
        solved: (name, weight as float [N, K], quantised weight) of each module.

    Raises:
        NumericsError: an error is above the limit, or NaN.
    """
    names, errors = [], []
    for batch in in_module_batches(((name, weight), quantized) for name, weight, quantized in solved):
        names += [name for name, _ in batch.items]
        errors.append(_errors([weight for _, weight in batch.items], batch.weight))
    if not errors:
        return
    # tolist() waits for the device once for all modules.
    for name, (mine, theirs, norm) in zip(names, torch.cat(errors).tolist(), strict=True):
        # Where round-to-nearest is exact, float16 rounding is still allowed for.
        limit = max(theirs, torch.finfo(torch.float16).eps * norm)
        if not mine <= FAR_ABOVE_RTN * limit:
            times = mine / (limit or 1.0)
            raise NumericsError(
                f"{name}: its quantised weights are {times:.1f} times as far from the original as "
                f"round-to-nearest's, at most {FAR_ABOVE_RTN:g} expected; calibrate on more text (--tokens), "
                f"raise --damp, or keep it unquantised with --override '{_pattern(name)}=skip'"
            )


def _errors(weights: Sequence[Tensor], quantized: QuantizedWeight) -> Tensor:
    """[weights, 3]: the norms of each weight's error, of round-to-nearest's error, and of the weight."""
    wide = torch.cat([weight.to(torch.float32) for weight in weights])
    # With activation order, round-to-nearest needs the channels in the order of their groups.
    ordered = wide if quantized.has_trivial_g_idx else wide[:, torch.argsort(quantized.g_idx, stable=True)]
    rounded = round_to_nearest(ordered, quantized.scheme, name="weight")
    differences = (wide - quantized.dequantize(), ordered - rounded.dequantize(), wide)
    return torch.stack([each.reshape(len(weights), -1).norm(dim=1) for each in differences], dim=1)


def _pattern(name: str) -> str:
    return "^" + name.replace(".", r"\.") + "$"
