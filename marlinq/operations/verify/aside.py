"""Work that is done aside by threads, its results taken in order.

Judging a module is thousands of operations that are too small for several threads each. So a module belongs
to one thread, and several are judged at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch

ResultT = TypeVar("ResultT")


class Aside:
    """A number of threads that use one of torch's threads each, as the caller does until the end.

    Used as a context: its end waits for all work, and takes all results unless an exception ends it.

    Args:
        threads: with one or none, work is done by the caller at once, with all of torch's threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pending: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._before = torch.get_num_threads()

    def __enter__(self) -> Aside:
        if self._threads > 1:
            self._before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,))
            torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        try:
            while self._pending and kind is None:
                self._take()
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            self._pending.clear()
            # The threads' own settings reach some libraries for all of them.
            torch.set_num_threads(self._before)

    def do(self, work: Callable[[], ResultT], take: Callable[[ResultT], None]) -> None:
        """Has ``work`` done; the caller's thread hands its result to ``take``, in the order of the calls.

        Waits while each thread has work and one more is ready for them.

        Raises:
            Exception: what earlier work, or its taker, has raised.
        """
        if self._pool is None:
            take(work())
            return
        while len(self._pending) > self._threads:
            self._take()
        self._pending.append((self._pool.submit(work), take))

    def _take(self) -> None:
        done, take = self._pending.popleft()
        take(done.result())
