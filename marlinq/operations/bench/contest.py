"""Contenders in turn: each is checked, then timed; a peer's failure is part of the result, ours is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from marlinq.operations.bench.report import OURS
from marlinq.operations.bench.timing import capture, launches_for, time_in_turn

# Peers round in other places; only a wrong product is off by this much.
_PEER_SLACK = 4.0
_Result = TypeVar("_Result")
Launch = Callable[[int], Tensor]
"""``launch(number)``: one launch of a contender, of those that take turns in a graph."""


def attempted(name: str, what: str, notes: list[str], action: Callable[[], _Result]) -> _Result | None:
    """The result of ``action``; None where it is a peer's and fails, which is noted as ``what``."""
    try:
        return action()
    except Exception as error:
        # A peer may fail in any way of its own; the report says how.
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
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a launch, and the relative error, of every contender that is right.

    Args:
        contenders: what makes each ready, by name.
        place: what is multiplied, for notes.
        expected: float32 [rows, N].
        rows: which rows of a result those are.
        shape: of a result.
        tolerance: largest relative error of our kernel.
        floor: seconds that a launch takes at least.
        notes: told of peers that are wrong or fail.
        sustained: as in :func:`marlinq.operations.bench.timing.time_in_turn`.
    """
    launches = launches_for(1.5 * floor)
    errors: dict[str, float] = {}
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}

    def checked(name: str, ready: Callable[[], Launch]) -> tuple[float, torch.cuda.CUDAGraph] | None:
        launch = ready()
        error = relative_error(launch, rows, expected, shape)
        limit = tolerance * (1.0 if name == OURS else _PEER_SLACK)
        if error < limit:
            return error, capture(launch, launches)
        notes.append(
            f"{name} is wrong on {place}: relative error {error:.2g}, at most {limit:.0e} expected; not timed"
        )
        return None

    for name, ready in contenders.items():
        made = attempted(name, f"failed on {place}", notes, partial(checked, name, ready))
        if made is not None:
            errors[name], graph = made
            graphs[name] = graph, launches
    return time_in_turn(graphs, 1.5 * floor, sustained=sustained), errors


def relative_error(launch: Launch, rows: Tensor, expected: Tensor, shape: tuple[int, int]) -> float:
    """The norm of the error of some rows, as a share of the norm of what is expected of them."""
    # The allocator hands the freed block out again, so that elements nobody writes are found to be NaN.
    poison = torch.full(shape, torch.nan, dtype=torch.float16, device=expected.device)
    del poison
    out = launch(0)
    if tuple(out.shape) != shape:
        return float("inf")
    return float((out[rows].float() - expected).norm() / expected.norm())


def first_and_last(count: int, checked: int, device: torch.device) -> Tensor:
    """The first and the last rows of a result, which stand for all: a wrong tile shows at either end."""
    rows = {*range(min(count, checked)), *range(max(0, count - checked), count)}
    return torch.tensor(sorted(rows), device=device)
