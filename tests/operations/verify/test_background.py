"""Work done by background threads: order, threads of torch, and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from marlinq.operations.verify.background import BackgroundThreads


def test_results_are_taken_in_order_by_the_caller() -> None:
    taken: list[tuple[int, int]] = []
    workers: set[int] = set()

    def work(number: int) -> Callable[[], int]:
        def run() -> int:
            time.sleep(0.01 * (number % 3 == 0))
            workers.add(threading.get_ident())
            return number

        return run

    with BackgroundThreads(3) as background:
        for number in range(12):
            background.do(work(number), lambda done: taken.append((done, threading.get_ident())))
    assert taken == [(number, threading.get_ident()) for number in range(12)]
    assert threading.get_ident() not in workers


def test_one_thread_is_the_caller_itself() -> None:
    taken: list[int] = []
    with BackgroundThreads(1) as background:
        background.do(threading.get_ident, taken.append)
        assert taken == [threading.get_ident()]


def test_each_thread_computes_alone_and_the_caller_gets_its_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside: list[int] = []
        with BackgroundThreads(2) as background:
            background.do(torch.get_num_threads, inside.append)
            assert torch.get_num_threads() == 1
        assert inside == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_not_more_than_one_waits_for_the_threads() -> None:
    gate = threading.Event()
    begun: list[int] = []

    def work() -> int:
        begun.append(1)
        gate.wait(10)
        return 0

    with BackgroundThreads(2) as background:
        for _ in range(3):
            background.do(work, lambda _: None)
        # The fourth call waits for the first result.
        threading.Timer(0.05, gate.set).start()
        background.do(work, lambda _: None)
        assert gate.is_set()
    assert len(begun) == 4


def test_an_error_reaches_the_caller_and_ends_the_work() -> None:
    def fail() -> None:
        raise ArithmeticError("module 3")

    def use() -> None:
        with BackgroundThreads(2) as background:
            for _ in range(10):
                background.do(fail, lambda _: None)

    before = torch.get_num_threads()
    with pytest.raises(ArithmeticError, match="module 3"):
        use()
    assert torch.get_num_threads() == before
