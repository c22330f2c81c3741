"""The numbers of a GPU: measured ones for an H200, and for no other GPU an H200's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from marlinq.kernels import decide
from marlinq.kernels.contract.device import H200, GpuProperties, device_of
from marlinq.kernels.driver import cuda_driver
from tests.kernels.problems import int4_problem

# Properties as the driver gives them.
AN_H200 = GpuProperties("NVIDIA H200", (9, 0), 132, 232_448, 1_980_000, 3_201_000, 6144, 62_914_560)
AN_H100 = GpuProperties("NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448, 1_980_000, 2_619_000, 5120, 52_428_800)
A_4090 = GpuProperties(
    "NVIDIA GeForce RTX 4090", (8, 9), 128, 101_376, 2_520_000, 10_501_000, 384, 75_497_472
)


def test_an_h200_has_the_measured_numbers() -> None:
    assert device_of(AN_H200, H200.clusters) == H200
    reason = decide(int4_problem(16, 4096, 4096, 128, False, False), H200).reason
    assert "unmeasured" not in reason


@pytest.mark.parametrize(
    ("gpu", "architecture", "name", "terabytes", "megahertz"),
    [
        # Bandwidths of 3.35 and 1.01 TB/s by the driver's properties, times the share that an H200 reaches
        # of its 4.92 TB/s.
        (AN_H100, "sm_90a", "nvidia-h100-80gb-hbm3", 3.07, 1755),
        (A_4090, "sm_89", "nvidia-geforce-rtx-4090", 0.92, 2234),
    ],
)
def test_another_gpu_has_numbers_of_its_own(
    gpu: GpuProperties, architecture: str, name: str, terabytes: float, megahertz: float
) -> None:
    device = device_of(gpu)
    assert (device.architecture, device.name, device.measured) == (architecture, name, False)
    assert device.bandwidth / 1e12 == pytest.approx(terabytes, abs=0.005)
    assert device.clock / 1e6 == pytest.approx(megahertz, abs=0.5)
    assert device.cache_bytes == gpu.cache_bytes
    # Bytes a cycle and multiprocessor are what GPUs have in common.
    per_cycle = device.cache_bandwidth / (device.multiprocessors * device.clock)
    assert per_cycle == pytest.approx(H200.cache_bandwidth / (132 * H200.clock))
    assert "unmeasured GPU" in decide(int4_problem(16, 4096, 4096, 128, False, False), device).reason


def test_slower_memory_is_expected_to_take_longer() -> None:
    def seconds(gpu: GpuProperties) -> float:
        return decide(int4_problem(1, 28672, 8192, 128, False, False), device_of(gpu, H200.clusters)).seconds

    # A single row of a large layer is bound by the memory: 4.5 TB/s are 1.47 times 3.07.
    assert seconds(AN_H100) == pytest.approx(1.47 * seconds(AN_H200), rel=0.15)


def test_a_slice_is_not_the_whole_gpu() -> None:
    assert not device_of(AN_H200._replace(multiprocessors=60)).measured


def test_unknown_rates_are_taken_for_an_h200s() -> None:
    device = device_of(AN_H100._replace(clock_khz=0, memory_clock_khz=0, cache_bytes=0))
    assert (device.clock, device.bandwidth, device.cache_bytes) == (
        H200.clock,
        H200.bandwidth,
        H200.cache_bytes,
    )


def test_properties_come_from_torch_and_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self) -> None:
            # By the numbers of cuda.h.
            self.attributes = {13: 1_980_000, 36: 2_619_000, 37: 5120, 38: 52_428_800}

        def cuInit(self, flags: int) -> int:  # noqa: N802
            return flags

        def cuDeviceGet(self, device: object, index: int) -> int:  # noqa: N802
            device._obj.value = index + 40  # type: ignore[attr-defined]
            return 0

        def cuDeviceGetAttribute(self, found: object, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
            assert device.value == 41
            found._obj.value = self.attributes.get(attribute, -1)  # type: ignore[attr-defined]
            return 0 if attribute in self.attributes else 1

    properties = SimpleNamespace(
        name=AN_H100.name,
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=232_448,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    library = Library()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: library)
    assert cuda_driver.gpu_properties(1) == AN_H100
    library.attributes.clear()
    assert cuda_driver.gpu_properties(1)[4:] == (0, 0, 0, 0)
