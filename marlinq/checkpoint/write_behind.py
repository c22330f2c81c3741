"""Write tensors to a checkpoint in background threads, while the caller computes the next ones.

                                              one thread per tensor
    caller --tensors, notes--> queue of two --copy engine--> page-locked memory --pwrite, SHA-256--> shard
                                                                                       commit --> journal

A lot is the tensors of one :meth:`WriteBehind.write`. Lots are committed in order, each with its notes. The
tensors of a lot are written in parallel, since a core computes SHA-256 more slowly than a disk writes.
Tensors on a GPU are copied on a stream of their own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint.reader import Checkpoint
from marlinq.checkpoint.writer import CheckpointWriter
from marlinq.core.dtypes import FLOATS, torch_dtype
from marlinq.core.errors import NumericsError
from marlinq.core.progress import ReportProgress

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_LOTS = 2
_WRITERS = 4
"""Threads that write tensors of a lot, each with a tensor in page-locked memory."""
COPYING = "copying unquantised tensors"
"""Name of the stage in progress reports."""
# Threads that copy stored tensors: one core computes SHA-256 more slowly than a disk writes.
_COPIERS = 2
_COMMIT_BYTES = 1 << 28


class WriteBehind:
    """Writes tensors in the background; use it in a ``with`` statement, which waits until all are written.

    Args:
        writer: writer with the tensors in its plan.
        device: device of the tensors.
    """

    def __init__(self, writer: CheckpointWriter, device: torch.device) -> None:
        self._writer = writer
        self._device = device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="marlinq-commit")
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="marlinq-write")
        self._waiting: deque[Future[None]] = deque()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Also after an error: complete lots are committed for a resumed run.
        self._pool.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        if kind is None:
            self.wait()

    def write(self, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        """Queue a lot to be written and committed; its tensors must not change any more.

        Blocks while two earlier lots are in the queue.

        Raises:
            OutputError: an earlier lot could not be written.
        """
        while len(self._waiting) >= _LOTS:
            self._waiting.popleft().result()
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))
        self._waiting.append(self._pool.submit(self._write, dict(tensors), dict(notes), ready))

    def wait(self) -> None:
        """Wait until everything is written and committed.

        Raises:
            OutputError: something could not be written.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def _write(
        self, tensors: dict[str, Tensor], notes: dict[str, Any], ready: torch.cuda.Event | None
    ) -> None:
        def write(name: str) -> None:
            # Removed from the lot, so that a tensor's GPU memory is freed as soon as it is written.
            self._writer.write(name, self._on_host(tensors.pop(name), ready))

        # Largest first, so that no thread begins the largest tensor last.
        names = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
        under_way = [self._writers.submit(write, name) for name in names]
        wait(under_way)
        for each in under_way:
            each.result()
        self._writer.commit(notes)

    def _on_host(self, tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        if self._stream is None or ready is None:
            return tensor.cpu()
        # torch page-locks memory through the current device, which in a new thread may be another.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._stream.wait_event(ready)
            copy.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return copy


class CopyBehind:
    """Copies stored tensors to a writer in the background; use it in a ``with`` statement.

    Args:
        checkpoint: checkpoint with the tensors.
        writer: writer with the tensors in its plan, under the same names, dtypes and shapes.
        names: tensors to copy; those already written are left out.
        progress: called by :meth:`finish`.
        finite: those of ``names`` whose values must not be NaN or infinite.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        writer: CheckpointWriter,
        names: Iterable[str],
        progress: ReportProgress,
        *,
        finite: Collection[str] = (),
    ) -> None:
        self._checkpoint = checkpoint
        self._finite = frozenset(finite)
        self._writer = writer
        self._progress = progress
        self._missing = [name for name in names if name not in writer.written]
        self._pool = ThreadPoolExecutor(_COPIERS, thread_name_prefix="marlinq-copy")
        self._copies: list[Future[None]] = []

    def __enter__(self) -> CopyBehind:
        self._copies = [self._pool.submit(self._copy, name) for name in self._missing]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The writer's files are closed after this.
        self._pool.shutdown(wait=True, cancel_futures=True)

    def check(self) -> None:
        """Raise the error of a copy that has failed already, as :meth:`finish` does at the end."""
        for copy in self._copies:
            if copy.done():
                copy.result()

    def finish(self) -> None:
        """Wait until everything is copied, and commit it.

        Raises:
            NumericsError: a tensor that should be finite is not.
            CheckpointError: the source was changed.
            OutputError: something could not be written.
        """
        for done, copy in enumerate(self._copies, start=1):
            copy.result()
            self._progress(COPYING, done, len(self._copies))
        self._writer.commit()

    def _copy(self, name: str) -> None:
        info = self._checkpoint.tensors[name]
        seen = 0

        def refuse_not_finite(values: Tensor) -> None:
            # Before the tensor counts as written, lest a resumed run takes it as it is.
            nonlocal seen
            seen += values.numel()
            bad = values.numel() - int(torch.isfinite(values).sum())
            if bad:
                of = "" if seen == math.prod(info.shape) else "the first "
                raise NumericsError(
                    f"{name}: {bad} of {of}{seen} weights are NaN or infinite; check the source checkpoint"
                )

        is_checked = name in self._finite and info.dtype in FLOATS
        if self._checkpoint.computes(name):
            tensor = self._checkpoint.tensor(name)
            if is_checked:
                refuse_not_finite(tensor)
            self._writer.write(name, tensor)
        else:
            dtype = torch_dtype(info.dtype)

            def check_piece(piece: memoryview) -> None:
                refuse_not_finite(torch.frombuffer(piece, dtype=dtype))

            source = self._checkpoint.files[info.shard]
            self._writer.copy(name, source, info.offset, check_piece if is_checked else None)
        if info.nbytes >= _COMMIT_BYTES:
            self._writer.commit()
