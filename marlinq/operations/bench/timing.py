"""GPU timing: captured launches over rotating copies, contenders in turn, and the limits they are held to."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import cold_read
from marlinq.kernels.driver.raw_kernel import INT64, POINTER, RawKernel

_MAX_LAUNCHES = 40
_MIN_LAUNCHES = 2
_REPLAY_SECONDS = 3e-3
_CELL_SECONDS = 30e-3
_ROUNDS = (9, 41)
# An H200 under full load is at its power limit after 50 to 100 ms (docs/kernels.md, "Two clocks").
_HEATING_SECONDS = 0.15
_COLD_CACHES = 3
_FILLERS = 4
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
    graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]],
    expected_seconds: float,
    *,
    sustained: bool = False,
) -> dict[str, float]:
    """Median seconds a launch of every graph (with its launches).

    Replays alternate, so drift hits all alike, in another order every round. After each the GPU rests as long
    as it took: without rests large products reach the power limit within 0.1 s, and a median over the moments
    before and after is neither's.

    Args:
        graphs: by name.
        expected_seconds: about how long one launch takes, which sets the number of rounds.
        sustained: no rests; replays begin to count when the GPU has been busy long enough to be at its limit.
    """
    replay = max((expected_seconds * launches for _, launches in graphs.values()), default=1.0)
    rounds = max(_ROUNDS[0], min(_ROUNDS[1], int(_CELL_SECONDS / replay)))
    for graph, _ in graphs.values():
        graph.replay()
    device = torch.device("cuda", torch.cuda.current_device())
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    filler = torch.zeros(_COLD_CACHES * cache // 4, dtype=torch.int32, device=device)
    spans: dict[str, list[float]] = {name: [] for name in graphs}
    order, chance = list(graphs), random.Random(0)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    while min(map(len, spans.values()), default=rounds) < rounds:
        counts = not sustained or time.perf_counter() - begun > _HEATING_SECONDS
        chance.shuffle(order)
        for name in order:
            # Reads, 0.2 ms of them, that keep the GPU busy until the graph is there: a launch from idle takes
            # longer.
            for _ in range(_FILLERS):
                filler.amax()
            start, end = _event(), _event()
            start.record()
            graphs[name][0].replay()
            end.record()
            end.synchronize()
            span = start.elapsed_time(end) / 1e3
            if counts:
                spans[name].append(span / graphs[name][1])
            if not sustained:
                time.sleep(span)
    return {name: statistics.median(found) for name, found in spans.items()}


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
            launches = launches_for(expected)
            graphs[f"{threads}x{unroll}x{grid}"] = capture(launch, launches), launches
    return min(time_in_turn(graphs, expected).values())


def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of cuBLAS on an 8192 x 8192 x 8192 product of random data, at full clock."""
    a, b = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, b.t(), out=out)
    launches = 8
    graph = capture(lambda index: torch.mm(a, b.t(), out=out), launches)
    operations = 2.0 * _PEAK_SIZE**3
    return operations / time_in_turn({"peak": (graph, launches)}, operations / 7e14)["peak"]
