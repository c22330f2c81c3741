"""Reading the tensors of a checkpoint ahead of their use, with several threads, straight to a device.

On a CPU the threads read into the tensors' own memory. For a GPU they read into a ring of page-locked
buffers, from which copies run on a stream of their own, beside the reading of what follows:

    shard --preadv--> ring --copy engine--> tensor on the GPU

Tensors have the stored dtype and order; callers cast or repack them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING

from marlinq.checkpoint.header import TensorInfo
from marlinq.checkpoint.reader import Checkpoint
from marlinq.core.devices import check_device_name
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import CheckpointError, EnvironmentProblem

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

PIECE_BYTES = 8 << 20
"""Bytes that a thread reads at once, and bytes of a page-locked buffer."""
RING_BYTES = 128 << 20
"""Bytes of page-locked memory for copies to a GPU. torch keeps it for the next load of the process."""

# Threads at most: 8 saturate a GPU's link when reading from the page cache.
_MOST_THREADS = 8
# Python's switch interval while reading. After a read a thread needs the global lock, which a computing
# thread releases only after 5 ms by default; a core reads tens of megabytes in that time.
_SWITCH_SECONDS = 2e-4


def lock_ring_early(device: str) -> threading.Thread | None:
    """Initialise torch on the GPU that ``device`` names, and page-lock the ring, in a thread; imports torch
    first.

    torch keeps the memory for the first :class:`ReadAhead` of the process. Without such a GPU, or with too
    little memory, nothing happens; the code that needs the GPU reports it.

    Returns:
        The thread, or None where ``device`` names no GPU.
    """
    if check_device_name(device) == "cpu" or not torch.cuda.is_available():
        return None
    index = int(device.partition(":")[2] or 0)
    thread = threading.Thread(target=_lock_ring, args=(index,), name="marlinq-lock-ring")
    thread.start()
    return thread


def _lock_ring(index: int) -> None:
    try:
        _locked(torch.device("cuda", index))
    except RuntimeError:
        return


def _locked(device: torch.device) -> Tensor:
    """A ring's page-locked memory, uint8 [:data:`RING_BYTES`]."""
    # torch page-locks memory through the current device, and would initialise another device for it.
    with torch.cuda.device(device):
        return torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True, eq=False)
class _Slot:
    """A page-locked buffer, and the end of the last copy out of it."""

    buffer: Tensor
    copied: torch.cuda.Event


@dataclass(frozen=True, eq=False)
class _Flight:
    """A tensor that is being read: its memory, and a future for each piece."""

    octets: Tensor
    pieces: tuple[Future[None], ...]


class ReadAhead:
    """Reads tensors of ``checkpoint`` ahead, to ``device``, in the stored dtype.

    Reading starts in the order of :meth:`expect`, as far ahead as ``budget`` allows; take tensors in that
    order. Any other tensor is read when it is asked for. Use it in a ``with`` statement, which ends its
    threads.

    Args:
        checkpoint: an open checkpoint. Each file is read through its one handle and must not change
            (:mod:`marlinq.checkpoint.source`).
        device: the CPU or a GPU.
        budget: bytes of tensors whose reading has started and that were not taken yet. A tensor larger than
            this is read only when it is asked for: its size in the header is untrusted until a caller has
            checked it.
        threads: number of reading threads; by default the number of cores, at most 8.

    Attributes:
        path: folder of the checkpoint.
        tensors: the checkpoint's tensors by name.
        bytes_read: bytes of all tensors whose reading has started.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, *, budget: int, threads: int | None = None
    ) -> None:
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._device = device
        self._budget = budget
        self._threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="marlinq-read")
        self._waiting: dict[str, None] = {}
        self._flying: dict[str, _Flight] = {}
        self._flying_bytes = 0
        self._started: float | None = None
        self._landed = 0.0
        self._ring: SimpleQueue[_Slot] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._switch_interval = sys.getswitchinterval()

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._checkpoint.tensors

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first tensor until the last piece was read (its copy to a GPU may
        still run)."""
        return 0.0 if self._started is None else max(0.0, self._landed - self._started)

    def __enter__(self) -> ReadAhead:
        sys.setswitchinterval(min(self._switch_interval, _SWITCH_SECONDS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            # Copies out of the ring must end before its memory is freed, also after an error.
            self._stream.synchronize()
        self._flying.clear()
        sys.setswitchinterval(self._switch_interval)

    def expect(self, names: Iterable[str]) -> None:
        """Append ``names`` to the tensors that will be taken, in order."""
        self._waiting |= dict.fromkeys(name for name in names if name not in self._flying)
        self._start_more()

    def forget(self, names: Iterable[str]) -> None:
        """Remove ``names`` from the tensors that will be taken."""
        for name in names:
            self._waiting.pop(name, None)
            flight = self._flying.pop(name, None)
            if flight is not None:
                wait(flight.pieces)
                self._flying_bytes -= self.tensors[name].nbytes
        self._start_more()

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name`` in memory of its own, on the device, ready for the current stream.

        Raises:
            CheckpointError: there is no such tensor, or its file was changed since it was opened.
            EnvironmentProblem: the device's memory does not suffice.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: no tensor named {name}")
        if self._checkpoint.computes(name):
            self._waiting.pop(name, None)
            return self._checkpoint.tensor(name).to(self._device)
        if name not in self._flying:
            self._start(info)
        # Start the next tensors before waiting for this one, so that no thread idles.
        self._flying_bytes -= info.nbytes
        self._start_more()
        flight = self._flying.pop(name)
        for piece in flight.pieces:
            piece.result()
        if self._stream is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(self._stream)
            # The memory belongs to the stream of the copies: it may be reused only after the current stream's
            # work.
            flight.octets.record_stream(here)
        return flight.octets.view(torch_dtype(info.dtype)).reshape(info.shape)

    def _start_more(self) -> None:
        while self._waiting:
            name = next(iter(self._waiting))
            info = self.tensors.get(name)
            if info is None or self._checkpoint.computes(name):
                # Computed tensors and unknown names are handled by tensor().
                del self._waiting[name]
                continue
            if self._flying_bytes + info.nbytes > self._budget:
                return
            self._start(info)

    def _start(self, info: TensorInfo) -> None:
        """Allocate memory for a tensor and submit its pieces to the threads."""
        self._waiting.pop(info.name, None)
        if self._started is None:
            self._started = time.perf_counter()
            self._open_ring()
        octets = self._memory(info.nbytes)
        starts = range(0, info.nbytes, PIECE_BYTES)
        pieces = (
            self._pool.submit(self._read, info, start, octets[start : start + PIECE_BYTES])
            for start in starts
        )
        self._flying[info.name] = _Flight(octets, tuple(pieces))
        self._flying_bytes += info.nbytes
        self.bytes_read += info.nbytes

    def _open_ring(self) -> None:
        if self._device.type != "cuda":
            return
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._ring = SimpleQueue()
        locked = _locked(self._device)
        for start in range(0, RING_BYTES, PIECE_BYTES):
            buffer = locked[start : start + PIECE_BYTES]
            self._ring.put(_Slot(buffer, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def _memory(self, nbytes: int) -> Tensor:
        try:
            if self._stream is None:
                return torch.empty(nbytes, dtype=torch.uint8)
            with torch.cuda.stream(self._stream):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            # torch raises a plain RuntimeError when the host has too little memory.
            if not isinstance(error, torch.OutOfMemoryError) and self._stream is not None:
                raise
            raise EnvironmentProblem(
                f"{self.path}: {self._device} has too little memory for the tensors; use another --device"
            ) from None

    def _read(self, info: TensorInfo, start: int, octets: Tensor) -> None:
        """Fill ``octets`` with the bytes of a tensor from byte ``start`` on. Runs in a thread."""
        file = self._checkpoint.files[info.shard]
        slot = None if self._ring is None else self._ring.get()
        try:
            if slot is None:
                target = octets
            else:
                slot.copied.synchronize()
                target = slot.buffer[: octets.numel()]
            view = memoryview(target.numpy())  # type: ignore[arg-type]
            if not file.read_into(view, info.offset + start):
                raise CheckpointError(f"{file.path}: tensor {info.name} ends early; the file was truncated")
            if slot is not None:
                with torch.cuda.stream(self._stream):
                    octets.copy_(target, non_blocking=True)
                    slot.copied.record()
            self._landed = time.perf_counter()
        finally:
            if self._ring is not None and slot is not None:
                self._ring.put(slot)
