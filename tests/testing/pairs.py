"""Which of many combinations run every time: enough of them that each pair of values meets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def every_value(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of all ``cases`` in their order, marked slow where others have all of their values."""
    return _covering(cases, 1)


def every_pair(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of all ``cases`` in their order, marked slow where others have all pairs of their values.

    A fault that takes two values to show is found by those that are left; one that takes three, by all.
    """
    return _covering(cases, 2)


def _covering(cases: Sequence[tuple[Any, ...]], together: int) -> list[Any]:
    """Few cases have every combination of ``together`` values that occurs; the others are marked slow."""
    combined = [set(combinations(enumerate(map(repr, case)), together)) for case in cases]
    missing = set().union(*combined)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(combined[index] & missing))
        chosen.add(best)
        missing -= combined[best]
    return [
        pytest.param(*case, marks=[] if index in chosen else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def first_of_each(cases: Sequence[Any], kind: Callable[[Any], object]) -> list[Any]:
    """Parameters of all ``cases``, marked slow but for the first of each kind."""
    seen: set[object] = set()
    found = []
    for case in cases:
        found.append(pytest.param(case, marks=pytest.mark.slow if kind(case) in seen else []))
        seen.add(kind(case))
    return found


def slow_but(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters of all ``cases``, marked slow but for ``chosen``."""
    listed = list(cases)
    assert all(case in listed for case in chosen), "a chosen case is not among the cases"
    return [pytest.param(case, marks=[] if case in chosen else pytest.mark.slow) for case in listed]


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Parameters of all pairs, marked slow but for a diagonal, on which every value of both lists is.

    For lists that have little to do with each other: what matters is that each value runs.
    """
    shorter = min(len(first), len(second))
    return [
        pytest.param(one, other, marks=[] if i % shorter == j % shorter else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]
