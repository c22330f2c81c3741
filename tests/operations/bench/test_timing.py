"""Timing in turn: what counts, what rests, and in which order."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch

from marlinq.operations.bench import timing
from marlinq.operations.bench.timing import GraphRecording, capture, time_in_turn


class Machine:
    """A GPU whose replays take a given time, longer once it has been busy for a while; and the clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, heated_after: float) -> None:
        self.now, self.busy, self.heated_after = 0.0, 0.0, heated_after
        self.slept: list[float] = []
        self.log: list[str] = []
        machine = self

        class Event:
            def record(self) -> None:
                self.at = machine.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at - self.at)

        def sleep(seconds: float) -> None:
            machine.slept.append(seconds)
            machine.now += seconds
            machine.busy = 0.0

        properties = types.SimpleNamespace(L2_cache_size=4096)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        zeros = torch.zeros
        monkeypatch.setattr(
            torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype)
        )  # there is no GPU
        monkeypatch.setattr(timing, "_event", Event)
        clock = types.SimpleNamespace(sleep=sleep, perf_counter=lambda: machine.now)
        monkeypatch.setattr(timing, "time", clock)

    def recording(self, name: str, seconds: float, launches: int) -> GraphRecording:
        def replay() -> None:
            took = seconds * (2 if self.busy > self.heated_after else 1)
            self.now += took
            self.busy += took
            self.log.append(name)

        graph = types.SimpleNamespace(replay=replay)
        return GraphRecording(graph, launches, lambda index: None)  # type: ignore[arg-type]


def test_rests_are_as_long_as_replays_and_keep_it_cool(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, heated_after=7e-3)
    recordings = {"a": machine.recording("a", 1e-3, 4), "b": machine.recording("b", 3e-3, 4)}
    assert time_in_turn(recordings, 5e-4) == pytest.approx({"a": 2.5e-4, "b": 7.5e-4})
    # 30 ms by the expected 2 ms a replay, and one of each that does not count.
    assert machine.log.count("a") == machine.log.count("b") == 16
    assert sorted(machine.slept) == pytest.approx([1e-3] * 15 + [3e-3] * 15)
    assert [machine.log[i : i + 2] for i in range(2, 32, 2)].count(["b", "a"]) not in (0, 15)


def test_sustained_replays_count_when_it_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, heated_after=0.1)
    recordings = {"a": machine.recording("a", 1e-3, 1), "b": machine.recording("b", 3e-3, 1)}
    assert time_in_turn(recordings, 2e-3, sustained=True) == pytest.approx({"a": 2e-3, "b": 6e-3})
    assert not machine.slept


@pytest.mark.gpu
@pytest.mark.timed
def test_rests_are_never_slower() -> None:
    a, b = (torch.randn(8192, 8192, dtype=torch.float16, device="cuda") for _ in range(2))
    out = a @ b
    recordings = {"product": capture(lambda index: torch.mm(a, b, out=out), 2)}
    rested = time_in_turn(recordings, 2e-3)["product"]
    # On an H200 0.87 of it; a GPU that stays below its limit takes the same.
    assert rested < 1.03 * time_in_turn(recordings, 2e-3, sustained=True)["product"]


@pytest.mark.gpu
def test_tensors_that_a_graph_reads_live_as_long_as_it() -> None:
    def recorded() -> tuple[GraphRecording, weakref.ref[torch.Tensor]]:
        ones = torch.ones(1024, device="cuda")
        return capture(lambda index: out.copy_(ones), 1), weakref.ref(ones)

    out = torch.zeros(1024, device="cuda")
    recording, read = recorded()
    gc.collect()
    assert read() is not None
    # The allocator would give it the memory of `ones`, had that been freed.
    twos = torch.full((1024,), 2.0, device="cuda")
    recording.graph.replay()
    assert out.eq(1).all()
    assert twos.eq(2).all()
