"""What a launch hands to the CUDA driver, whose library a stand-in replaces."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from marlinq.kernels import driver

_MAP = ctypes.c_ubyte * driver.TENSOR_MAP_BYTES


class _Small(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("address", ctypes.c_void_p))


class _Large(ctypes.Structure):
    _fields_ = (("map", _MAP), ("address", ctypes.c_void_p), ("count", ctypes.c_int))


class _Driver:
    """Keeps what every launch was given, read the way the driver reads it."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.launches: list[tuple[list[int], list[int] | None, list[bytes]]] = []

    def cuLaunchKernelEx(self, config: object, handle: object, pointers: object, extra: object) -> int:  # noqa: N802
        given = config._obj  # type: ignore[attr-defined]
        numbers = [getattr(given, name) for name, *_ in given._fields_ if name != "attributes"]
        # CUlaunchAttribute: an id, four bytes of padding, the value.
        raw = ctypes.string_at(given.attributes, 12)
        attribute = [int.from_bytes(raw[at : at + 4], "little") for at in (0, 8)]
        layout = {2: _Small, 3: _Large}[len(pointers)]  # type: ignore[arg-type]
        sizes = [getattr(layout, name).size for name, _ in layout._fields_]
        values = [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)]  # type: ignore[call-overload]
        self.launches.append((numbers, attribute if given.attribute_count else None, values))
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    library = _Driver()
    monkeypatch.setattr(driver, "_driver", lambda: library)
    # Builds of torch without CUDA lack it.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    return library


FUNCTION = driver.Function(None, ctypes.c_void_p(1), 2, None)


def test_every_parameter_arrives_at_its_pointer(library: _Driver) -> None:
    content = bytes(range(128))
    driver.launch(FUNCTION, 5, 96, 1024, _Small(-3, 2**40))
    driver.launch(FUNCTION, 6, 128, 0, _Large(_MAP(*content), 77, 9), dependent=True)
    driver.launch(FUNCTION, 7, 32, 16, _Small(4, 8))
    assert library.launches == [
        ([5, 1, 1, 96, 1, 1, 1024, 72, 0], None, [b"\xfd\xff\xff\xff", (2**40).to_bytes(8, "little")]),
        ([6, 1, 1, 128, 1, 1, 0, 72, 1], [6, 1], [content, b"M" + bytes(7), b"\t" + bytes(3)]),
        ([7, 1, 1, 32, 1, 1, 16, 72, 0], None, [b"\x04" + bytes(3), b"\x08" + bytes(7)]),
    ]  # fmt: skip


def test_threads_do_not_share_what_they_hand_over(library: _Driver) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: driver.launch(FUNCTION, i, i, i, _Small(i, i)), range(1, 2000)))
    for numbers, _, values in library.launches:
        expected = numbers[0]
        assert (numbers[3], numbers[6]) == (expected, expected)
        assert [int.from_bytes(value, "little") for value in values] == [expected, expected]


def test_a_refused_launch_is_an_error(library: _Driver) -> None:
    library.status = 701
    with pytest.raises(RuntimeError, match="CUDA error 701: 5 blocks of 96 threads, 1024 bytes"):
        driver.launch(FUNCTION, 5, 96, 1024, _Small(1, 2))


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
    monkeypatch.setattr(driver, "_driver", lambda: library)
    if failing:
        with pytest.raises(RuntimeError, match="CUDA error 2 at allocating 4096 bytes"):
            driver.zeroed_memory(4096)
    else:
        assert driver.zeroed_memory(4096) == 2**40
        assert library.calls == ["allocate 4096", "stream, flags 1", "4096 times 0", "wait", "destroy"]
    assert library.mode == library.GLOBAL


@pytest.mark.parametrize(("active", "expected"), [(0, 0), (1, 7)])
def test_streams_know_their_capture(monkeypatch: pytest.MonkeyPatch, active: int, expected: int) -> None:
    class Library:
        status = 0

        def cuStreamGetCaptureInfo_v2(  # noqa: N802
            self, stream: ctypes.c_void_p, state: object, number: object, *rest: None
        ) -> int:
            assert stream.value == 16
            assert rest == (None, None, None)
            state._obj.value = active  # type: ignore[attr-defined]
            number._obj.value = 7  # type: ignore[attr-defined]
            return self.status

    library = Library()
    monkeypatch.setattr(driver, "_driver", lambda: library)
    assert driver.capture_of(16) == expected
    library.status = 906
    with pytest.raises(RuntimeError, match="CUDA error 906"):
        driver.capture_of(16)
