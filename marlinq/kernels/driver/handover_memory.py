"""Memory through which blocks of a stream-K launch hand over sums (``cuda/reduce/stream_k_fixup.cuh``).

Sums lie in memory of torch's allocator, taken for every launch and given back at once: what takes it next on
the stream runs later, and a graph keeps what was taken at its capture.

Flags have to be zero before a launch and are again behind it, so launches that never touch them at the same
time share them: those of a stream, and those that one stream brought into one graph. Graphs may be replayed
on any stream, beside others, so each owns a set of flags for as long as the driver knows it
(:class:`marlinq.kernels.driver.cuda_driver.EndOfGraph`); then the set is another graph's. A stream keeps its
set.
Flags don't come from torch's allocator, which during captures and their rehearsals wants its memory back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.driver.cuda_driver import EndOfGraph, capture_of, empty_strided, stream_id, zeroed_memory

_SLAB_BYTES = 1 << 20
# Words of a set, so that hardly any launch needs more: a launch has one flag a block that runs at once.
_SET_WORDS = 1 << 12
_LINE = 128  # bytes, which streams don't share
_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD


def handover_memory(handover: Handover, device_index: int) -> tuple[Tensor, int]:
    """The sums, to be kept until the launch is made on the current stream, and the flags' address.

    Inside :func:`marlinq.kernels.driver.cuda_driver.on_device`.
    """
    sums = empty_strided((handover.floats,), (1,), torch.float32)
    return sums, _flags(device_index, handover.flags)


# Device, stream (its id, or its handle within a capture), thread, and the capture's number; 0 for none.
_Key = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Set:
    """Words of zeros, whose owner is a stream or a graph."""

    address: int
    words: int
    end: EndOfGraph = field(default_factory=EndOfGraph)


class _Pool:
    """The flags of one device: cut from slabs that are never freed, given out and taken back in sets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[_Set] = []
        self._of_graphs: list[tuple[_Key, _Set]] = []
        self._next = self._end = 0
        self.sets = 0

    def take(self, key: _Key, words: int, graph: int) -> _Set:
        """A set for a stream, or for a graph (0 for none) until its end; on the current device."""
        with self._lock:
            self._take_back()
            words = max(words, _SET_WORDS)
            place = next((i for i, one in enumerate(self._free) if one.words >= words), None)
            taken = self._cut(words) if place is None else self._free.pop(place)
            if graph:
                taken.end.watch(graph)
                self._of_graphs.append((key, taken))
            return taken

    def _take_back(self) -> None:
        """Make the sets of graphs that are gone free again: their last launch has set all flags to zero."""
        kept = []
        for key, one in self._of_graphs:
            if one.end.has_come():
                if _owned.get(key) is one:
                    del _owned[key]
                self._free.append(one)
            else:
                kept.append((key, one))
        self._of_graphs = kept

    def _cut(self, words: int) -> _Set:
        size = -(-4 * words // _LINE) * _LINE
        if self._next + size > self._end:
            slab_bytes = max(size, _SLAB_BYTES)
            self._next = zeroed_memory(slab_bytes)
            self._end = self._next + slab_bytes
        address = self._next
        self._next += size
        self.sets += 1
        return _Set(address, words)


_pools: dict[int, _Pool] = {}
_owned: dict[_Key, _Set] = {}


def _flags(device_index: int, count: int) -> int:
    """The address of ``count`` words that no launch uses which may run beside one on the current stream."""
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    capture = capture_of(stream)
    key: _Key
    if capture is None:
        key = device_index, stream_id(stream), 0, 0
    else:
        # The driver gives no id of a stream that is being captured. A stream outlives its capture, so the
        # handle is enough within one; only the default stream of a thread shares its handle with others.
        thread = threading.get_ident() if stream == _PER_THREAD_STREAM else 0
        key = device_index, stream, thread, capture.number
    owned = _owned.get(key)
    if owned is None or owned.words < count:
        pool = _pools.setdefault(device_index, _Pool())
        owned = _owned[key] = pool.take(key, count, capture.graph if capture else 0)
    return owned.address
