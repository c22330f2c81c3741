"""Runs work in background threads and delivers results in order.

Judging a module is thousands of operations, each too small for several threads. So each module is judged by
one thread, and several modules at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch

ResultT = TypeVar("ResultT")


class BackgroundThreads:
    """A context manager with background threads; inside, torch uses one thread in each, and in the caller.

    Its end waits for all work and delivers all results, unless an exception ends it.

    Args:
        threads: number of threads; with 0 or 1, the caller does the work at once with all of torch's threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pending: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._before = torch.get_num_threads()

    def __enter__(self) -> BackgroundThreads:
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
            # Some libraries apply a thread's setting to the whole process.
            torch.set_num_threads(self._before)

    def do(self, work: Callable[[], ResultT], take: Callable[[ResultT], None]) -> None:
        """Queues ``work``. The caller's thread later passes its result to ``take``, in the order of the
        calls.

        Blocks while every thread is busy and one more piece of work is queued.

        Raises:
            Exception: an exception of earlier work or of its ``take``.
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
