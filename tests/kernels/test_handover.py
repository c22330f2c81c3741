"""Flags for the blocks of a launch: launches that may run at once never have the same ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from marlinq.kernels import handover
from marlinq.kernels.driver import PER_THREAD_STREAM

START = 1 << 32


class _Gpu:
    """Its current stream and memory."""

    def __init__(self) -> None:
        self.stream = 0
        self.capturing = False
        self.allocated: list[int] = []

    def zeroed_memory(self, size: int) -> int:
        self.allocated.append(size)
        return START * len(self.allocated)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    made = _Gpu()
    monkeypatch.setattr(handover, "zeroed_memory", made.zeroed_memory)
    monkeypatch.setattr(handover, "_slabs", {})
    monkeypatch.setattr(handover, "_streams", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: made.stream, raising=False)
    return made


def test_launches_of_a_stream_share_flags(gpu: _Gpu) -> None:
    found = []
    for gpu.stream in (0, 16, 32):
        first = handover._flags(0, 1000)
        assert handover._flags(0, 500) == first
        assert handover._flags(0, 1001) == first
        found.append(first)
    larger = handover._flags(0, 5000)
    assert handover._flags(0, 1000) == larger, "the stream has these now"
    places = sorted([*found, larger, larger + 4 * 5000])
    assert all(after - before >= 4 * 1001 for before, after in pairwise(places))
    assert len(gpu.allocated) == 1
    gpu.stream = 0
    assert handover._flags(1, 1000) == 2 * START, "another device has memory of its own"


def test_launches_in_graphs_have_flags_of_their_own(gpu: _Gpu) -> None:
    eager = handover._flags(0, 1000)
    gpu.capturing = True
    places = [handover._flags(0, 33) for _ in range(10)]
    assert places[0] >= eager + 4 * 1000
    assert all(after - before >= 4 * 33 for before, after in pairwise(places))
    assert all(place % 128 == 0 for place in places)
    gpu.capturing = False
    assert handover._flags(0, 1000) == eager


def test_memory_grows_by_slabs(gpu: _Gpu) -> None:
    gpu.capturing = True
    slab = handover._SLAB_BYTES
    assert [handover._flags(0, slab // 8) for _ in range(3)] == [START, START + slab // 2, 2 * START]
    assert handover._flags(0, slab) == 3 * START
    assert gpu.allocated == [slab, slab, 4 * slab]


def test_every_thread_has_another_default_stream(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.stream = PER_THREAD_STREAM
    mine = handover._flags(0, 100)
    monkeypatch.setattr("threading.get_ident", lambda: -1)
    other = handover._flags(0, 100)
    assert other != mine
    gpu.stream = 16
    shared = handover._flags(0, 100)
    monkeypatch.undo()
    assert shared not in (mine, other)
