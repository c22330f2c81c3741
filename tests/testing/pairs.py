"""Marks most combinations of test parameters as slow, so that those left still cover all values or pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def every_value(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Test parameters of all ``cases`` in order; enough stay unmarked to have every single value."""
    return _covering(cases, 1)


def every_pair(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Test parameters of all ``cases`` in order; enough stay unmarked to have every pair of values.

    A fault that needs two values to show is found by the unmarked cases; one that needs three, by all.
    """
    return _covering(cases, 2)


def _covering(cases: Sequence[tuple[Any, ...]], together: int) -> list[Any]:
    """Test parameters; enough stay unmarked to have every occurring combination of ``together`` values."""
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
    """Test parameters of all ``cases``; all except the first of each kind are marked slow."""
    seen: set[object] = set()
    found = []
    for case in cases:
        found.append(pytest.param(case, marks=pytest.mark.slow if kind(case) in seen else []))
        seen.add(kind(case))
    return found


def slow_but(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Test parameters of all ``cases``; all except ``chosen`` are marked slow."""
    listed = list(cases)
    assert all(case in listed for case in chosen), "a chosen case is not among the cases"
    return [pytest.param(case, marks=[] if case in chosen else pytest.mark.slow) for case in listed]


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Test parameters of all pairs; those on a diagonal, which has every value of both lists, stay unmarked.

    For lists that are nearly independent of each other, so that each value must run but not each pair.
    """
    shorter = min(len(first), len(second))
    return [
        pytest.param(one, other, marks=[] if i % shorter == j % shorter else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]
