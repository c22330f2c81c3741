"""Rates and sizes of this machine's GPUs, from which the cost models estimate times."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache

from marlinq.core.errors import EnvironmentProblem
from marlinq.kernels.contract.device import Device, device_of
from marlinq.kernels.contract.instantiation import cold_read
from marlinq.kernels.driver.cuda_driver import active_clusters, gpu_properties
from marlinq.kernels.driver.module import load_kernel


@lru_cache(maxsize=16)
def device_numbers(index: int) -> Device:
    """Rates and sizes of CUDA device ``index``, from torch and the driver.

    Raises:
        EnvironmentProblem: the GPU is older than compute capability 8.0.
    """
    device = device_of(gpu_properties(index))
    if device.capability < 80:
        major, minor = divmod(device.capability, 10)
        raise EnvironmentProblem(
            f"GPU {index} has compute capability {major}.{minor}; the kernels need 8.0 or later"
        )
    if not device.has_clusters:
        return device
    return replace(device, clusters=_clusters(device.architecture, device.shared_bytes, index))


def _clusters(architecture: str, shared_bytes: int, index: int) -> tuple[tuple[int, ...], ...]:
    """:attr:`Device.clusters`, asked of the driver for 1, 2 and 3 blocks that fill a multiprocessor's shared
    memory."""
    threads = 32
    function = load_kernel(cold_read(threads, unroll=1), architecture, index, shared_bytes)
    # The driver reserves a kilobyte of shared memory for every block.
    rooms = [shared_bytes, *((shared_bytes + 1024) // blocks - 1024 for blocks in (2, 3))]
    try:
        return tuple(
            tuple(active_clusters(function, cluster, threads, room) for cluster in range(1, 9))
            for room in rooms
        )
    except RuntimeError as error:
        warnings.warn(f"{error}; how many clusters run at once is estimated", stacklevel=2)
        return ()
