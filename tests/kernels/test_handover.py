"""Flags for the blocks of a launch: launches that may run at once never have the same ones, and graphs that
are gone have none."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch

from marlinq.kernels.driver import handover_memory
from marlinq.kernels.driver.cuda_driver import Capture, EndOfGraph

START = 1 << 32


class _Gpu:
    """Its current stream, the capture that this is part of, memory, and graphs that hold sets of flags."""

    def __init__(self) -> None:
        self.stream = 0
        self.capture = 0
        self.allocated: list[int] = []
        self.owned: dict[int, list[EndOfGraph]] = {}

    def zeroed_memory(self, size: int) -> int:
        self.allocated.append(size)
        return START * len(self.allocated)

    def capture_of(self, stream: int) -> Capture | None:
        assert stream == self.stream
        return Capture(self.capture, 1000 + self.capture) if self.capture else None

    def stream_id(self, stream: int) -> int:
        # Another handle may stand for the same stream, but never the same number for another. The driver
        # names no stream while it is captured (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED).
        assert not self.capture
        return stream + 5

    def watch(self, end: EndOfGraph, graph: int) -> None:
        self.owned.setdefault(graph - 1000, []).append(end)

    def destroy(self, capture: int) -> None:
        """As the driver does with a graph: it calls the destructor on the object."""
        for end in self.owned.pop(capture):
            ctypes.CDLL(None).sem_post(end._semaphore)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    made = _Gpu()
    monkeypatch.setattr(handover_memory, "zeroed_memory", made.zeroed_memory)
    monkeypatch.setattr(handover_memory, "capture_of", made.capture_of)
    monkeypatch.setattr(handover_memory, "stream_id", made.stream_id)
    monkeypatch.setattr(EndOfGraph, "watch", lambda end, graph: made.watch(end, graph))
    monkeypatch.setattr(handover_memory, "_pools", {})
    monkeypatch.setattr(handover_memory, "_owned", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: made.stream, raising=False)
    return made


def test_launches_share_flags_within_a_stream_and_a_capture(gpu: _Gpu) -> None:
    found = []
    for gpu.capture in (0, 7, 8):
        for gpu.stream in (0, 16, 32):
            first = handover_memory._flags(0, 1000)
            assert handover_memory._flags(0, 500) == first
            assert handover_memory._flags(0, 1001) == first
            found.append(first)
    assert all(after - before >= 4 * 1001 for before, after in pairwise(sorted(found)))
    assert all(address % 128 == 0 for address in found)
    assert len(gpu.allocated) == 1
    gpu.stream = gpu.capture = 0
    assert handover_memory._flags(0, 1000) == found[0]
    assert handover_memory._flags(1, 1000) == 2 * START, "another device has memory of its own"


def test_the_flags_of_graphs_that_are_gone_serve_others(gpu: _Gpu) -> None:
    of_stream = handover_memory._flags(0, 132)
    for gpu.capture in range(1, 1001):
        for gpu.stream in (0, 16):
            assert handover_memory._flags(0, 132) != of_stream
        if gpu.capture > 3:
            gpu.destroy(gpu.capture - 3)
    # One set of flags for the stream, and one for each of two streams in the four graphs that live at once.
    assert handover_memory._pools[0].sets == 1 + 2 * 4
    assert len(gpu.allocated) == 1
    assert len(handover_memory._owned) <= 1 + 2 * 4
    gpu.capture, gpu.stream = 0, 0
    assert handover_memory._flags(0, 132) == of_stream


def test_the_flags_of_graphs_that_are_there_are_never_given_to_others(gpu: _Gpu) -> None:
    held: dict[int, int] = {}
    for gpu.capture in range(1, 200):
        address = handover_memory._flags(0, 132)
        assert address not in held.values()
        held[gpu.capture] = address
        # Every third stays for good.
        if gpu.capture % 3:
            gpu.destroy(gpu.capture)
            del held[gpu.capture]
    assert handover_memory._pools[0].sets == len(held) + 1


def test_a_graph_that_needs_more_keeps_both_sets_until_its_end(gpu: _Gpu) -> None:
    gpu.capture = 4
    first = handover_memory._flags(0, 1000)
    larger = handover_memory._flags(0, 5000)
    gpu.capture = 5
    assert handover_memory._flags(0, 100) not in (first, larger)
    gpu.destroy(4)
    gpu.capture = 6
    assert {handover_memory._flags(0, 5000), handover_memory._flags(1, 100)} == {larger, 2 * START}
    gpu.capture = 7
    assert handover_memory._flags(0, 100) == first


def test_a_stream_that_needs_more_gets_other_flags(gpu: _Gpu) -> None:
    first = handover_memory._flags(0, 1000)
    larger = handover_memory._flags(0, 5000)
    assert larger >= first + 4 * 1000
    assert handover_memory._flags(0, 1000) == larger
    gpu.stream = 16
    assert handover_memory._flags(0, 1000) >= larger + 4 * 5000


def test_memory_grows_by_slabs(gpu: _Gpu) -> None:
    slab = handover_memory._SLAB_BYTES
    found = []
    for gpu.stream in range(8, 11):
        found.append(handover_memory._flags(0, slab // 8))
    assert found == [START, START + slab // 2, 2 * START]
    assert handover_memory._flags(0, slab) == 3 * START
    assert gpu.allocated == [slab, slab, 4 * slab]
