"""Tests that need a GPU are left out where there is none, and said once; run alone they are skipped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import WithoutGPU


class Item:
    def __init__(self) -> None:
        self.markers: list[Any] = []

    def add_marker(self, marker: Any) -> None:
        self.markers.append(marker)


def leave_out(items: list[Any], marked: list[Any]) -> tuple[WithoutGPU, list[Any]]:
    """The plugin after a collection, and the tests that it has deselected."""
    without, deselected = WithoutGPU(), []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(hook=hook)
    without.leave_out(config, items, marked)
    return without, deselected


def said(without: WithoutGPU) -> list[str]:
    lines: list[str] = []
    reporter: Any = SimpleNamespace(write_line=lines.append)
    without.pytest_terminal_summary(reporter)
    return lines


def test_they_leave_the_others_and_one_line() -> None:
    items = [Item() for _ in range(4)]
    left = list(items)
    without, deselected = leave_out(left, items[1:3])
    assert left == [items[0], items[3]]
    assert deselected == items[1:3]
    assert said(without) == ["2 tests need an NVIDIA GPU and were left out"]
    assert not any(item.markers for item in items)


def test_workers_that_collected_the_same_tests_are_counted_once() -> None:
    without = WithoutGPU()
    for _ in range(2):
        without.pytest_testnodedown(SimpleNamespace(workeroutput={"tests_without_gpu": 7}))
    without.pytest_testnodedown(SimpleNamespace())  # a worker that was stopped
    assert said(without) == ["7 tests need an NVIDIA GPU and were left out"]


def test_alone_they_are_skipped_with_the_reason() -> None:
    items = [Item(), Item()]
    without, deselected = leave_out(items, list(items))
    assert len(items) == 2
    assert [item.markers[0].kwargs["reason"] for item in items] == ["needs an NVIDIA GPU"] * 2
    assert not deselected
    assert said(without) == []
