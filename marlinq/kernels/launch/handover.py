"""Memory through which the blocks of one launch hand sums to each other (``cuda/w4a16_wgmma.cu``, EVEN).

Sums lie in memory of torch's allocator, taken for every launch and given back at once: what takes it next on
the stream runs later, and a graph keeps what was taken at its capture.

Flags have to be zero before a launch and are again behind it, so launches that never touch them at the same
time share them: those of a stream, and those that one stream brought into one graph. Graphs may be replayed
on any stream, beside others, so theirs are their own for good. Flags don't come from torch's allocator, which
during captures and their rehearsals wants its memory back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.launch.driver import PER_THREAD_STREAM, capture_of, empty_strided, zeroed_memory

_SLAB_BYTES = 1 << 20
# Of a stream, so that hardly any launch needs more than the ones before.
_STREAM_FLAGS = 1 << 12
_LINE = 128  # bytes, which streams don't share


class Handover(NamedTuple):
    """What a launch needs.

    Attributes:
        floats: float32 sums, uninitialised.
        flags: words of 32 bits, which are zero.
    """

    floats: int
    flags: int

    def memory(self, device_index: int) -> tuple[Tensor, int]:
        """The sums, to be kept until the launch is made on the current stream, and the flags' address.

        Inside :func:`marlinq.kernels.launch.driver.on_device`.
        """
        sums = empty_strided((self.floats,), (1,), torch.float32)
        return sums, _flags(device_index, self.flags)


@dataclass
class _Slab:
    """Zeros that are given away piece by piece and never come back."""

    next: int
    end: int


_slabs: dict[int, _Slab] = {}
_streams: dict[tuple[int, int, int, int], tuple[int, int]] = {}
_lock = threading.Lock()


def _flags(device_index: int, count: int) -> int:
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    thread = threading.get_ident() if stream == PER_THREAD_STREAM else 0
    key = device_index, stream, thread, capture_of(stream)
    address, room = _streams.get(key, (0, 0))
    if room < count:
        room = max(count, _STREAM_FLAGS)
        address = _take(device_index, room)
        _streams[key] = address, room
    return address


def _take(device_index: int, count: int) -> int:
    size = -(-4 * count // _LINE) * _LINE
    with _lock:
        slab = _slabs.get(device_index)
        if slab is None or slab.next + size > slab.end:
            slab_bytes = max(size, _SLAB_BYTES)
            start = zeroed_memory(slab_bytes)
            slab = _slabs[device_index] = _Slab(start, start + slab_bytes)
        address = slab.next
        slab.next += size
    return address
