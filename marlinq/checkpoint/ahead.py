"""Reading the tensors of a checkpoint ahead of their use, with several threads, straight to a device.

On a CPU the threads read into the tensors' own memory. For a GPU they read into a ring of page-locked
buffers, from which copies run on a stream of their own, beside the reading of what follows:

    shard --preadv--> ring --copy engine--> tensor on the GPU

Bytes arrive as they are stored; whoever takes a tensor casts or repacks it.
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
"""What a thread reads at once, and the size of a page-locked buffer."""
RING_BYTES = 128 << 20
"""Page-locked memory for the way to a GPU. torch keeps it for the next load of the process."""

# More only get into each other's way: 8 threads fill a GPU's link from the page cache.
_MOST_THREADS = 8
# A thread that comes back from a read needs the interpreter. Another thread that computes in Python gives
# it up after 5 ms by default, in which a core reads tens of megabytes.
_SWITCH_SECONDS = 2e-4


def lock_ring_early(device: str) -> threading.Thread | None:
    """Let a thread open torch's side of the GPU that ``device`` names and page-lock a ring's memory, which
    torch keeps for the first :class:`ReadAhead` of the process. Imports torch before that.

    Where there is no such GPU, or not so much memory, nothing happens, and whoever needs it says so.

    Returns:
        The thread, or None where no GPU is meant.
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
    # It comes through the current device, which would be opened for it.
    with torch.cuda.device(device):
        return torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True, eq=False)
class _Slot:
    """A page-locked buffer, and the end of the last copy out of it."""

    buffer: Tensor
    copied: torch.cuda.Event


@dataclass(frozen=True, eq=False)
class _Flight:
    """A tensor on its way: its memory, and its pieces."""

    octets: Tensor
    pieces: tuple[Future[None], ...]


class ReadAhead:
    """Tensors of ``checkpoint`` by name, on ``device``, in the dtype that is stored.

    Tensors are started in the order of :meth:`expect`, as far ahead as ``budget`` allows, and are best taken
    in that order; any other tensor is read when it is asked for. Use it in a ``with`` statement, which ends
    its threads.

    Args:
        checkpoint: an open checkpoint; its own rules hold: each file is read through its one handle and must
            not change (:mod:`marlinq.checkpoint.source`).
        device: the CPU or a GPU.
        budget: bytes of tensors that are started but not taken. A larger tensor is started when it is asked
            for, so that what a hostile header claims takes no memory before others have checked it.
        threads: number of reading threads; by default as many as there are cores, at most 8.

    Attributes:
        path, tensors: the checkpoint's.
        bytes_read: bytes of all tensors that were started.
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
        """From the start of the first tensor until the last piece was in its place, or on its way to the
        GPU."""
        return 0.0 if self._started is None else max(0.0, self._landed - self._started)

    def __enter__(self) -> ReadAhead:
        sys.setswitchinterval(min(self._switch_interval, _SWITCH_SECONDS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            # Copies out of the ring must not outlive it, whatever happened.
            self._stream.synchronize()
        self._flying.clear()
        sys.setswitchinterval(self._switch_interval)

    def expect(self, names: Iterable[str]) -> None:
        """Say which tensors will be taken next, in order, after those that were said before."""
        self._waiting |= dict.fromkeys(name for name in names if name not in self._flying)
        self._start_more()

    def forget(self, names: Iterable[str]) -> None:
        """Say which of the expected tensors nobody will take."""
        for name in names:
            self._waiting.pop(name, None)
            flight = self._flying.pop(name, None)
            if flight is not None:
                wait(flight.pieces)
                self._flying_bytes -= self.tensors[name].nbytes
        self._start_more()

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name`` in memory of its own, on the device; work on the current stream may use it.

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
        # The next ones are started first, so that no thread idles while this one lands.
        self._flying_bytes -= info.nbytes
        self._start_more()
        flight = self._flying.pop(name)
        for piece in flight.pieces:
            piece.result()
        if self._stream is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(self._stream)
            # Freed, the memory goes back to the copies' stream, which must then wait for this one.
            flight.octets.record_stream(here)
        return flight.octets.view(torch_dtype(info.dtype)).reshape(info.shape)

    def _start_more(self) -> None:
        while self._waiting:
            name = next(iter(self._waiting))
            info = self.tensors.get(name)
            if info is None or self._checkpoint.computes(name):
                # Whoever takes it is told, or computes it.
                del self._waiting[name]
                continue
            if self._flying_bytes + info.nbytes > self._budget:
                return
            self._start(info)

    def _start(self, info: TensorInfo) -> None:
        """Get memory for a tensor and hand its pieces to the threads."""
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
            # A host's allocator has no class of its own.
            if not isinstance(error, torch.OutOfMemoryError) and self._stream is not None:
                raise
            raise EnvironmentProblem(
                f"{self.path}: {self._device} has too little memory for the tensors; use another --device"
            ) from None

    def _read(self, info: TensorInfo, start: int, octets: Tensor) -> None:
        """Fill ``octets`` with what stands ``start`` bytes behind the beginning of a tensor. Runs in a
        thread."""
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
