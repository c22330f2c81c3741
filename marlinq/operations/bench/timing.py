"""GPU timing with CUDA graphs over rotating copies of operands, and measured limits of the hardware."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import cold_read
from marlinq.kernels.driver.raw_kernel import INT64, POINTER, RawKernel

_MAX_LAUNCHES = 40
_MIN_LAUNCHES = 2
_REPLAY_SECONDS = 3e-3
_CELL_SECONDS = 30e-3
_ROUNDS = (9, 41)
_HEATING_SECONDS = 0.15
"""seconds of full load after which an H200 is at its power limit (50 to 100 ms: docs/kernels.md, "Two
clocks")"""
_COLD_CACHES = 3
_FILLERS = 4
_PEAK_SIZE = 8192


def copies_for(size: int, device: torch.device) -> int:
    """Number of copies of ``size`` bytes to use in turn, so that each has left L2 when it is used again."""
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(2, -(-_COLD_CACHES * cache // size))


def launches_for(seconds: float) -> int:
    """Number of launches in a graph, for a kernel that takes about ``seconds``."""
    return max(_MIN_LAUNCHES, min(_MAX_LAUNCHES, int(_REPLAY_SECONDS / seconds)))


@dataclass(frozen=True)
class GraphRecording:
    """Launches recorded in a CUDA graph.

    Attributes:
        graph: the graph.
        launches: number of launches in it.
        launch: the function that was recorded. A graph reads memory by address, so the tensors that
            ``launch`` refers to must live as long as the graph.
    """

    graph: torch.cuda.CUDAGraph
    launches: int
    launch: Callable[[int], object]


def capture(launch: Callable[[int], object], launches: int) -> GraphRecording:
    """A CUDA graph of ``launch(0)`` to ``launch(launches - 1)``.

    ``launch`` must have run before, since compiling and allocating can't be captured.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # Not torch.cuda.graph(), which empties the allocator's cache and takes longer than the measurement.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for index in range(launches):
                launch(index)
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return GraphRecording(graph, launches, launch)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_in_turn(
    recordings: Mapping[str, GraphRecording],
    expected_seconds: float,
    *,
    sustained: bool = False,
) -> dict[str, float]:
    """Median seconds per launch of every recording.

    Recordings are replayed in turn, in another order every round, so that drift affects all alike. After each
    replay the GPU pauses for as long as the replay took: without pauses large products reach the power limit
    within 0.1 s, and a median over both clocks would mean neither.

    Args:
        recordings: name -> recording.
        expected_seconds: approximate seconds of a launch, which decides the number of rounds.
        sustained: no pauses; replays count once the GPU has been busy long enough to be at its power limit.
    """
    replay = max((expected_seconds * each.launches for each in recordings.values()), default=1.0)
    rounds = max(_ROUNDS[0], min(_ROUNDS[1], int(_CELL_SECONDS / replay)))
    for recording in recordings.values():
        recording.graph.replay()
    device = torch.device("cuda", torch.cuda.current_device())
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    filler = torch.zeros(_COLD_CACHES * cache // 4, dtype=torch.int32, device=device)
    spans: dict[str, list[float]] = {name: [] for name in recordings}
    order, chance = list(recordings), random.Random(0)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    while min(map(len, spans.values()), default=rounds) < rounds:
        counts = not sustained or time.perf_counter() - begun > _HEATING_SECONDS
        chance.shuffle(order)
        for name in order:
            # 0.2 ms of reads keep the GPU busy until the graph arrives, since a launch from idle takes
            # longer.
            for _ in range(_FILLERS):
                filler.amax()
            start, end = _event(), _event()
            start.record()
            recordings[name].graph.replay()
            end.record()
            end.synchronize()
            span = start.elapsed_time(end) / 1e3
            if counts:
                spans[name].append(span / recordings[name].launches)
            if not sustained:
                time.sleep(span)
    return {name: statistics.median(each) for name, each in spans.items()}


def cold_read_seconds(words: Tensor, scales: Tensor) -> float:
    """Seconds of a kernel that only reads ``words`` and ``scales``, as a launch of a graph, with a cold L2.

    The best of several grids; the bytes of both tensors must be multiples of 16.
    """
    device = words.device
    size = words.nbytes + scales.nbytes
    copies = [(words.clone(), scales.clone()) for _ in range(copies_for(size, device))]
    sink = torch.empty(1, dtype=torch.int32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    recordings: dict[str, GraphRecording] = {}
    expected = size / 4e12
    for threads, unroll in ((512, 4), (512, 8), (1024, 4)):
        kernel = RawKernel(cold_read(threads, unroll), device)
        whole = -(-size // (16 * threads * unroll))
        resident = 2048 // threads * processors
        for grid in sorted({whole, min(whole, resident), min(whole, resident // 2)}):

            def launch(
                index: int, kernel: RawKernel = kernel, grid: int = grid, threads: int = threads
            ) -> None:
                read, more = copies[index % len(copies)]
                kernel.launch(
                    grid,
                    threads,
                    (
                        (read.data_ptr(), POINTER),
                        (read.nbytes // 16, INT64),
                        (more.data_ptr(), POINTER),
                        (more.nbytes // 16, INT64),
                        (sink.data_ptr(), POINTER),
                    ),
                )

            launch(0)
            recordings[f"{threads}x{unroll}x{grid}"] = capture(launch, launches_for(expected))
    return min(time_in_turn(recordings, expected).values())


def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of cuBLAS on an 8192 x 8192 x 8192 product of random data, at full clock."""
    a, b = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, b.t(), out=out)
    recording = capture(lambda index: torch.mm(a, b.t(), out=out), 8)
    operations = 2.0 * _PEAK_SIZE**3
    return operations / time_in_turn({"peak": recording}, operations / 7e14)["peak"]
