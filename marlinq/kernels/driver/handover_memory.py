"""Memory through which blocks of a stream-K launch hand over sums (``cuda/reduce/stream_k_fixup.cuh``).

Sums lie in memory of torch's allocator, taken for every launch and freed at once. Whoever gets that memory
next on the stream runs later, and a graph keeps the memory that was allocated during its capture.

Flags are zero before a launch, and the launch leaves them zero. So launches that never run at the same time
share a set of flags: all launches of a stream, and all launches that one stream captured into one graph.
Graphs may be replayed on any stream beside others, so each graph has a set of its own until it is destroyed
(:class:`marlinq.kernels.driver.cuda_driver.EndOfGraph`); then the set is free for another graph. A stream
keeps its set for good. Flags don't come from torch's allocator, which reclaims memory after a capture or its
warm-up.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.driver.cuda_driver import EndOfGraph, capture_of, empty_strided, stream_id, zeroed_memory

_SLAB_BYTES = 1 << 20
# 32-bit words of a set, one flag for each block that runs at once: hardly any launch needs more.
_SET_WORDS = 1 << 12
_LINE = 128  # bytes of a cache line; sets of different streams share none
_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD


def handover_memory(handover: Handover, device_index: int) -> tuple[Tensor, int]:
    """A tensor for the sums, and the address of the flags; call inside
    :func:`marlinq.kernels.driver.cuda_driver.on_device`.

    Keep the tensor until the launch is made on the current stream.
    """
    sums = empty_strided((handover.floats,), (1,), torch.float32)
    return sums, _flags(device_index, handover.flags)


# Device, stream (its id, or its handle within a capture), thread, and the capture's number; 0 for none.
_Key = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Set:
    """Zeroed words that belong to one stream or one graph."""

    address: int
    words: int
    end: EndOfGraph = field(default_factory=EndOfGraph)


class _Pool:
    """The sets of flags of one device, cut from slabs that are never freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[_Set] = []
        self._of_graphs: list[tuple[_Key, _Set]] = []
        self._next = self._end = 0
        self.sets = 0

    def take(self, key: _Key, words: int, graph: int) -> _Set:
        """A set on the current device: for a stream if ``graph`` is 0, else for a graph until it is
        destroyed."""
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
        """Free the sets of graphs that were destroyed; their last launches left all flags zero."""
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
    """Address of ``count`` flags that no launch outside the current stream (or its capture) uses."""
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    capture = capture_of(stream)
    key: _Key
    if capture is None:
        key = device_index, stream_id(stream), 0, 0
    else:
        # The driver gives a capturing stream no id. Its handle is unique during the capture, except that all
        # threads have the same handle for their default streams.
        thread = threading.get_ident() if stream == _PER_THREAD_STREAM else 0
        key = device_index, stream, thread, capture.number
    owned = _owned.get(key)
    if owned is None or owned.words < count:
        pool = _pools.setdefault(device_index, _Pool())
        owned = _owned[key] = pool.take(key, count, capture.graph if capture else 0)
    return owned.address
