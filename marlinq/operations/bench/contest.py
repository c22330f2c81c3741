"""Checks and times marlinq and its peers on one product. A peer's failure becomes a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from marlinq.operations.bench.kernel_bench import OURS
from marlinq.operations.bench.timing import GraphRecording, capture, launches_for, time_in_turn

_PEER_SLACK = 4.0
"""factor on the tolerance for peers, which round differently; a wrong product is off by more"""
_Result = TypeVar("_Result")
Launch = Callable[[int], Tensor]
"""Function that launches a contender on copy number ``number`` of its operands."""


def attempted(name: str, what: str, notes: list[str], action: Callable[[], _Result]) -> _Result | None:
    """The result of ``action``; None if it is a peer's and fails, which is added to ``notes``."""
    try:
        return action()
    except Exception as error:
        # Peers raise exceptions of any kind; the report shows them.
        if name == OURS:
            raise
        lines = str(error).strip().splitlines()
        notes.append(f"{name} {what}: {type(error).__name__}: {lines[0] if lines else 'no message'}")
        return None


def check_and_time(
    contenders: Mapping[str, Callable[[], Launch]],
    *,
    place: str,
    expected: Tensor,
    rows: Tensor,
    shape: tuple[int, int],
    tolerance: float,
    floor: float,
    notes: list[str],
    sustained: bool = False,
    roundings: Mapping[str, float] = MappingProxyType({}),
) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds of a launch, relative error) of every contender whose result is right.

    Args:
        contenders: name -> function that prepares the contender.
        place: name of the product, for notes.
        expected: expected rows of the result, float32 [rows, N].
        rows: indices of these rows.
        shape: shape of a result.
        tolerance: largest relative error of marlinq's kernel.
        floor: least seconds of a launch.
        notes: list that notes about wrong or failing peers are added to.
        roundings: name -> largest relative error of a contender that rounds activations.
        sustained: measure without pauses, as in :func:`marlinq.operations.bench.timing.time_in_turn`.
    """
    launches = launches_for(1.5 * floor)
    errors: dict[str, float] = {}
    recordings: dict[str, GraphRecording] = {}

    def checked(name: str, ready: Callable[[], Launch]) -> tuple[float, GraphRecording] | None:
        launch = ready()
        error = relative_error(launch, rows, expected, shape)
        limit = roundings.get(name, tolerance * (1.0 if name == OURS else _PEER_SLACK))
        if error < limit:
            return error, capture(launch, launches)
        notes.append(
            f"{name} is wrong on {place}: relative error {error:.2g}, at most {limit:.0e} expected; not timed"
        )
        return None

    for name, ready in contenders.items():
        made = attempted(name, f"failed on {place}", notes, partial(checked, name, ready))
        if made is not None:
            errors[name], recordings[name] = made
    return time_in_turn(recordings, 1.5 * floor, sustained=sustained), errors


def relative_error(launch: Launch, rows: Tensor, expected: Tensor, shape: tuple[int, int]) -> float:
    """Norm of the error of some rows over the norm of the expected rows."""
    # Freed memory full of NaN, which the allocator gives to the result: unwritten elements become visible.
    poison = torch.full(shape, torch.nan, dtype=torch.float16, device=expected.device)
    del poison
    out = launch(0)
    if tuple(out.shape) != shape:
        return float("inf")
    return float((out[rows].float() - expected).norm() / expected.norm())


def first_and_last(count: int, checked: int, device: torch.device) -> Tensor:
    """Indices of the first and the last rows, on which a result is checked."""
    rows = {*range(min(count, checked)), *range(max(0, count - checked), count)}
    return torch.tensor(sorted(rows), device=device)
