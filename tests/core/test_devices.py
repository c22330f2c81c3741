from __future__ import annotations

import threading

import pytest
import torch

from marlinq.core.devices import check_device_name, resolve_device, start_beside
from marlinq.core.errors import EnvironmentProblem, UsageError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine of two GPUs, as far as torch tells."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, "cuda:0"),
        ("auto", "cuda:0"),
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        (torch.device("cuda"), "cuda:0"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cpu"), "cpu"),
    ],
)
def test_names_of_devices(gpus: int, name: str | torch.device | None, expected: str) -> None:
    assert str(resolve_device(name)) == expected


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(resolve_device("auto")) == str(resolve_device(None)) == "cpu"
    with pytest.raises(EnvironmentProblem, match="device cuda: torch sees no CUDA devices; run"):
        resolve_device("cuda")


def test_a_device_that_is_not_there(gpus: int) -> None:
    with pytest.raises(EnvironmentProblem, match="device cuda:2: torch sees 2 CUDA devices; run"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(
    "name", ["", "tpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "cpu:1", "mps", "cuda:99999"]
)
def test_names_that_are_no_device_are_refused(name: str) -> None:
    for check in (check_device_name, resolve_device):
        with pytest.raises(UsageError, match="device: expected auto, cpu, cuda or cuda:N, found"):
            check(name)


def test_a_gpu_is_started_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def fails() -> None:
        started.set()
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "init", fails)
    assert start_beside(torch.device("cpu")).result(30) is None
    assert not started.is_set()
    # An error of the thread is not raised here: whoever uses the GPU first meets it again.
    future = start_beside(torch.device("cuda", 1))
    assert started.wait(30)
    assert isinstance(future.exception(30), RuntimeError)
