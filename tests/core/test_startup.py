"""The driver opens the GPU during imports, and whatever goes wrong there is left to torch to report."""

from __future__ import annotations

import ctypes

import pytest

from marlinq.core import startup
from marlinq.core.errors import UsageError
from marlinq.core.startup import open_gpu_early


class Driver:
    """Counts the calls of the CUDA driver."""

    def __init__(self, result: int) -> None:
        self.calls: list[str] = []
        self._result = result

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return self._result

        return call


@pytest.mark.parametrize(
    ("result", "calls"), [(0, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), (100, ["cuInit"])]
)
def test_the_driver_opens_the_gpu(result: int, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(result)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = open_gpu_early("cuda:1")
    assert thread is not None
    thread.join()
    assert driver.calls == calls


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(startup.ctypes, "CDLL", absent)
    thread = open_gpu_early("auto")
    assert thread is not None
    thread.join()
    assert open_gpu_early("cpu") is None
    with pytest.raises(UsageError):
        open_gpu_early("abacus")
