"""Arguments of a launch for the CUDA driver, whose library a stand-in replaces."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from marlinq.kernels.driver import cuda_driver
from tests.testing import forks

_MAP = ctypes.c_ubyte * cuda_driver.TENSOR_MAP_BYTES


class _Small(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("address", ctypes.c_void_p))


class _Large(ctypes.Structure):
    _fields_ = (("map", _MAP), ("address", ctypes.c_void_p), ("count", ctypes.c_int))


class _Driver:
    """Keeps what every launch was given, read the way the driver reads it."""

    def __init__(self) -> None:
        self.status = 0
        self.seconds = 0.0
        self.contexts: dict[int, int | None] = {}
        self.launches: list[tuple[list[int], list[int] | None, list[bytes]]] = []

    def cuLaunchKernelEx(self, config: object, handle: object, pointers: object, extra: object) -> int:  # noqa: N802
        given = config._obj  # type: ignore[attr-defined]
        # Other threads run meanwhile, as they do while the real one works.
        time.sleep(self.seconds)
        numbers = [getattr(given, name) for name, *_ in given._fields_ if name != "attributes"]
        # CUlaunchAttribute: an id, four bytes of padding, the value.
        raw = ctypes.string_at(given.attributes, 12)
        attribute = [int.from_bytes(raw[at : at + 4], "little") for at in (0, 8)]
        places = pointers._obj  # type: ignore[attr-defined]
        layout = {2: _Small, 3: _Large}[len(places)]
        sizes = [getattr(layout, name).size for name, _ in layout._fields_]
        values = [ctypes.string_at(at, size) for at, size in zip(places, sizes, strict=True)]
        self.launches.append((numbers, attribute if given.attribute_count else None, values))
        return self.status

    def cuCtxGetCurrent(self, context: object) -> int:  # noqa: N802
        context._obj.value = self.contexts.get(threading.get_ident())  # type: ignore[attr-defined]
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.contexts[threading.get_ident()] = context.value
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    library = _Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: library)
    monkeypatch.setattr(cuda_driver, "_thread", cuda_driver._Thread())
    # Builds of torch without CUDA lack it.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    return library


FUNCTION = cuda_driver.Function(None, ctypes.c_void_p(1), 2, 55)


def test_every_parameter_arrives_at_its_pointer(library: _Driver) -> None:
    content = bytes(range(128))
    large = cuda_driver.Launches(FUNCTION, 6, 128, 0, _Large(_MAP(*content), 77, 9), dependent=True)
    cuda_driver.Launches(FUNCTION, 5, 96, 1024, _Small(-3, 2**40)).take().start()
    large.take().start()
    cuda_driver.Launches(FUNCTION, 7, 32, 16, _Small(4, 8)).take().start()
    assert library.launches == [
        ([5, 1, 1, 96, 1, 1, 1024, 72, 0], None, [b"\xfd\xff\xff\xff", (2**40).to_bytes(8, "little")]),
        ([6, 1, 1, 128, 1, 1, 0, 72, 1], [6, 1], [content, b"M" + bytes(7), b"\t" + bytes(3)]),
        ([7, 1, 1, 32, 1, 1, 16, 72, 0], None, [b"\x04" + bytes(3), b"\x08" + bytes(7)]),
    ]  # fmt: skip


def test_a_launch_follows_its_arguments_and_the_stream(
    library: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = cuda_driver.Launches(FUNCTION, 5, 96, 0, _Small(1, 2))
    for number in range(3):
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda _, at=number: 80 + at, raising=False
        )
        launch = launches.take()
        launch.arguments.address = number
        launch.start()
        launches.give(launch)
    assert [(numbers[7], values[1][0]) for numbers, _, values in library.launches] == [
        (80, 0),
        (81, 1),
        (82, 2),
    ]


def test_a_launch_is_taken_by_one_at_a_time(library: _Driver) -> None:
    launches = cuda_driver.Launches(FUNCTION, 5, 96, 0, _Small(1, 2))
    first, second = launches.take(), launches.take()
    first.arguments.count = 8
    second.arguments.count = 9
    first.start()
    second.start()
    assert [values[0][0] for _, _, values in library.launches] == [8, 9]
    launches.give(first)
    assert launches.take() is first
    assert launches.take().arguments.count == 1


def test_threads_do_not_share_what_they_hand_over(library: _Driver) -> None:
    launches = cuda_driver.Launches(FUNCTION, 5, 96, 0, _Small(0, 0))
    library.seconds = 1e-4

    def call(number: int) -> None:
        launch = launches.take()
        launch.arguments.count = launch.arguments.address = number
        launch.start()
        launches.give(launch)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(1, 500)))
    found = [[int.from_bytes(value, "little") for value in values] for _, _, values in library.launches]
    assert sorted(found) == [[number, number] for number in range(1, 500)]
    assert len({id(launches.take()) for _ in range(8)}) == 8


def test_every_thread_gets_a_context(library: _Driver) -> None:
    launches = cuda_driver.Launches(FUNCTION, 5, 96, 0, _Small(0, 0))
    library.contexts[threading.get_ident()] = 44
    launches.take()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: (launches.take(), threading.get_ident())[1]).result()
    assert library.contexts == {threading.get_ident(): 44, other: 55}


def test_a_refused_launch_is_an_error(library: _Driver) -> None:
    library.status = 701
    with pytest.raises(RuntimeError, match="CUDA error 701: 5 blocks of 96 threads, 1024 bytes"):
        cuda_driver.Launches(FUNCTION, 5, 96, 1024, _Small(1, 2)).take().start()


class _MemoryDriver:
    """Allocates one piece of memory, in a thread that takes part in a strict capture."""

    GLOBAL, RELAXED = 0, 2  # of CUstreamCaptureMode

    def __init__(self, failing: str = "") -> None:
        self.mode = self.GLOBAL
        self.failing = failing
        self.calls: list[str] = []

    def _called(self, name: str) -> int:
        assert self.mode == self.RELAXED
        self.calls.append(name)
        return 2 if name == self.failing else 0

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:  # noqa: N802
        given = mode._obj  # type: ignore[attr-defined]
        self.mode, given.value = given.value, self.mode
        return 0

    def cuMemAlloc_v2(self, address: object, size: ctypes.c_size_t) -> int:  # noqa: N802
        address._obj.value = 2**40  # type: ignore[attr-defined]
        return self._called(f"allocate {size.value}")

    def cuStreamCreate(self, stream: object, flags: int) -> int:  # noqa: N802
        stream._obj.value = 99  # type: ignore[attr-defined]
        return self._called(f"stream, flags {flags}")

    def cuMemsetD8Async(  # noqa: N802
        self,
        address: ctypes.c_uint64,
        value: ctypes.c_ubyte,
        size: ctypes.c_size_t,
        stream: ctypes.c_void_p,
    ) -> int:
        assert (address.value, stream.value) == (2**40, 99)
        return self._called(f"{size.value} times {value.value}")

    def cuStreamSynchronize(self, stream: ctypes.c_void_p) -> int:  # noqa: N802
        return self._called("wait")

    def cuStreamDestroy_v2(self, stream: ctypes.c_void_p) -> int:  # noqa: N802
        return self._called("destroy")


@pytest.mark.parametrize("failing", ["", "allocate 4096", "stream, flags 1", "wait"])
def test_zeros_are_no_part_of_a_capture(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    library = _MemoryDriver(failing)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: library)
    if failing:
        with pytest.raises(RuntimeError, match="CUDA error 2 at allocating 4096 bytes"):
            cuda_driver.zeroed_memory(4096)
    else:
        assert cuda_driver.zeroed_memory(4096) == 2**40
        assert library.calls == ["allocate 4096", "stream, flags 1", "4096 times 0", "wait", "destroy"]
    assert library.mode == library.GLOBAL


class _StreamDriver:
    """Knows one stream, and the graph that it is captured into."""

    def __init__(self) -> None:
        self.status = self.active = 0
        self.objects: list[tuple[int, object]] = []
        self.retained: list[tuple[int, int, int, int]] = []
        self.released = 0

    def cuStreamGetCaptureInfo_v2(  # noqa: N802
        self, stream: ctypes.c_void_p, state: object, number: object, graph: object, *rest: None
    ) -> int:
        assert stream.value == 16
        assert rest == (None, None)
        state._obj.value = self.active  # type: ignore[attr-defined]
        number._obj.value = 7  # type: ignore[attr-defined]
        graph._obj.value = 2**40  # type: ignore[attr-defined]
        return self.status

    def cuStreamGetId(self, stream: ctypes.c_void_p, number: object) -> int:  # noqa: N802
        number._obj.value = 100 + (stream.value or 0)  # type: ignore[attr-defined]
        return self.status

    def cuUserObjectCreate(  # noqa: N802
        self, made: object, given: ctypes.c_void_p, destructor: ctypes.c_void_p, count: int, flags: int
    ) -> int:
        assert (count, flags) == (1, 1)
        made._obj.value = 33  # type: ignore[attr-defined]
        self.objects.append((given.value or 0, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor.value)))
        return 0

    def cuGraphRetainUserObject(  # noqa: N802
        self, graph: ctypes.c_void_p, owned: ctypes.c_void_p, count: int, flags: int
    ) -> int:
        self.retained.append((graph.value or 0, owned.value or 0, count, flags))
        return self.status

    def cuUserObjectRelease(self, owned: ctypes.c_void_p, count: int) -> int:  # noqa: N802
        self.released += count
        return 0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> _StreamDriver:
    library = _StreamDriver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: library)
    return library


@pytest.mark.parametrize(("active", "expected"), [(0, None), (1, (7, 2**40))])
def test_streams_know_their_capture(
    streams: _StreamDriver, active: int, expected: tuple[int, int] | None
) -> None:
    streams.active = active
    assert cuda_driver.capture_of(16) == expected
    assert cuda_driver.stream_id(16) == 116
    streams.status = 906
    with pytest.raises(RuntimeError, match="CUDA error 906"):
        cuda_driver.capture_of(16)
    with pytest.raises(RuntimeError, match="CUDA error 906"):
        cuda_driver.stream_id(16)


def test_the_end_of_a_graph_is_told_from_any_thread(streams: _StreamDriver) -> None:
    end, other = cuda_driver.EndOfGraph(), cuda_driver.EndOfGraph()
    for _ in range(2):
        end.watch(2**40)
        assert not end.has_come()
        [(given, destructor)] = streams.objects
        # The driver's own thread, which has no interpreter.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(destructor, given).result()  # type: ignore[arg-type]
        assert end.has_come()
        assert not end.has_come()
        assert not other.has_come()
        streams.objects.clear()
    assert streams.retained == [(2**40, 33, 1, 1)] * 2
    streams.status = 1
    with pytest.raises(RuntimeError, match="CUDA error 1 "):
        end.watch(2**40)
    assert streams.released == 1


def test_memory_without_the_private_function_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_allocator", None)
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **named: made.append((*given, named)))
    with pytest.warns(UserWarning, match="_empty_strided_cuda"):
        cuda_driver.empty_strided((2, 3), (3, 1), torch.float16)
    cuda_driver.empty_strided((1,), (1,), torch.float32)
    assert made == [
        ((2, 3), (3, 1), {"dtype": torch.float16, "device": "cuda"}),
        ((1,), (1,), {"dtype": torch.float32, "device": "cuda"}),
    ]


def test_importing_the_kernels_touches_no_private_name_of_torch() -> None:
    script = """
import sys, torch
assert not [name for name in sys.modules if name.startswith("marlinq")]
class Nothing:
    def __getattr__(self, name):
        raise AttributeError(name)
torch._C._dynamo.guards = Nothing()
import marlinq.kernels
"""
    done = forks.run(script, modules=forks.TORCH)
    assert done.returncode == 0, done.stderr
