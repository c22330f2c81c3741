"""Flags for the blocks of a launch: launches that may run at once never have the same ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from marlinq.kernels.launch import handover
from marlinq.kernels.launch.driver import PER_THREAD_STREAM

START = 1 << 32


class _Gpu:
    """Its current stream, the capture that this is part of, and memory."""

    def __init__(self) -> None:
        self.stream = 0
        self.capture = 0
        self.allocated: list[int] = []

    def zeroed_memory(self, size: int) -> int:
        self.allocated.append(size)
        return START * len(self.allocated)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    made = _Gpu()
    monkeypatch.setattr(handover, "zeroed_memory", made.zeroed_memory)
    monkeypatch.setattr(handover, "capture_of", lambda stream: made.capture if stream == made.stream else 0)
    monkeypatch.setattr(handover, "_slabs", {})
    monkeypatch.setattr(handover, "_streams", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: made.stream, raising=False)
    return made


def test_launches_share_flags_within_a_stream_and_a_capture(gpu: _Gpu) -> None:
    found = []
    for gpu.capture in (0, 7, 8):
        for gpu.stream in (0, 16, 32):
            first = handover._flags(0, 1000)
            assert handover._flags(0, 500) == first
            assert handover._flags(0, 1001) == first
            found.append(first)
    assert all(after - before >= 4 * 1001 for before, after in pairwise(sorted(found)))
    assert all(address % 128 == 0 for address in found)
    assert len(gpu.allocated) == 1
    gpu.stream = gpu.capture = 0
    assert handover._flags(0, 1000) == found[0]
    assert handover._flags(1, 1000) == 2 * START, "another device has memory of its own"


def test_a_stream_that_needs_more_gets_other_flags(gpu: _Gpu) -> None:
    first = handover._flags(0, 1000)
    larger = handover._flags(0, 5000)
    assert larger >= first + 4 * 1000
    assert handover._flags(0, 1000) == larger
    gpu.stream = 16
    assert handover._flags(0, 1000) >= larger + 4 * 5000


def test_memory_grows_by_slabs(gpu: _Gpu) -> None:
    slab = handover._SLAB_BYTES
    found = []
    for gpu.stream in range(8, 11):
        found.append(handover._flags(0, slab // 8))
    assert found == [START, START + slab // 2, 2 * START]
    assert handover._flags(0, slab) == 3 * START
    assert gpu.allocated == [slab, slab, 4 * slab]


def test_every_thread_has_another_default_stream(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another_thread() -> int:
        with monkeypatch.context() as context:
            context.setattr("threading.get_ident", lambda: -1)
            return handover._flags(0, 100)

    gpu.stream = PER_THREAD_STREAM
    assert of_another_thread() != handover._flags(0, 100)
    gpu.stream = 16
    assert of_another_thread() == handover._flags(0, 100)
