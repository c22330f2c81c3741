"""GPU timing: captured launches over rotating copies, contenders in turn, and the limits they are held to."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from marlinq.kernels.raw import INT64, POINTER, RawKernel

_MAX_LAUNCHES = 40
_MIN_LAUNCHES = 2
_REPLAY_SECONDS = 3e-3
_CELL_SECONDS = 30e-3
_ROUNDS = (9, 41)
_COLD_CACHES = 3
_PEAK_SIZE = 8192


def copies_for(size: int, device: torch.device) -> int:
    """How many copies of ``size`` bytes to rotate so that each is out of L2 when its turn comes again."""
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(2, -(-_COLD_CACHES * cache // size))


def launches_for(seconds: float) -> int:
    """Launches in a graph of a kernel that takes about ``seconds``."""
    return max(_MIN_LAUNCHES, min(_MAX_LAUNCHES, int(_REPLAY_SECONDS / seconds)))


def capture(launch: Callable[[int], object], launches: int) -> torch.cuda.CUDAGraph:
    """A graph of ``launch(0)`` to ``launch(launches - 1)``.

    Everything that is compiled or allocated at first use must have run before.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # torch.cuda.graph() also empties the allocator's cache, which would take longer than the measurement.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for index in range(launches):
                launch(index)
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_in_turn(
    graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], expected_seconds: float
) -> dict[str, float]:
    """Median seconds a launch of every graph (with its launches).

    Replays alternate, so drift hits all alike, in another order every round, so that no graph always follows
    the one that heats most.

    Args:
        graphs: by name.
        expected_seconds: about how long one launch takes, which sets the number of rounds.
    """
    replay = max((expected_seconds * launches for _, launches in graphs.values()), default=1.0)
    rounds = max(_ROUNDS[0], min(_ROUNDS[1], int(_CELL_SECONDS / replay)))
    for graph, _ in graphs.values():
        graph.replay()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    order, chance = list(graphs), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            start, end = _event(), _event()
            start.record()
            graphs[name][0].replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3 / graphs[name][1]
        for name, pairs in events.items()
    }


def cold_read_seconds(words: Tensor, scales: Tensor) -> float:
    """Seconds that a plain read of ``words`` and ``scales`` takes as one launch of a graph, L2 cold.

    The best of a few grids; both tensors hold whole 16-byte vectors.
    """
    device = words.device
    size = words.nbytes + scales.nbytes
    copies = [(words.clone(), scales.clone()) for _ in range(copies_for(size, device))]
    sink = torch.empty(1, dtype=torch.int32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    expected = size / 4e12
    for threads, unroll in ((512, 4), (512, 8), (1024, 4)):
        kernel = RawKernel("cold_read.cu", "cold_read", device, {"THREADS": threads, "UNROLL": unroll})
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
            launches = launches_for(expected)
            graphs[f"{threads}x{unroll}x{grid}"] = capture(launch, launches), launches
    return min(time_in_turn(graphs, expected).values())


def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of cuBLAS on an 8192 x 8192 x 8192 product of random data."""
    a, b = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, b.t(), out=out)
    launches = 8
    graph = capture(lambda index: torch.mm(a, b.t(), out=out), launches)
    operations = 2.0 * _PEAK_SIZE**3
    return operations / time_in_turn({"peak": (graph, launches)}, operations / 7e14)["peak"]
