"""Formulas that the cost models share: overlapping work, queues, and the time a wave's bytes need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.device import Device, Load, registers_of_a_thread
from marlinq.kernels.contract.problem import Problem

# Warp schedulers and 32-bit registers of a multiprocessor.
SCHEDULERS = 4
REGISTERS = 65536


@dataclass(frozen=True)
class Physics:
    """Constants of the hardware, the same for every kernel; each model fits its own beside them.

    Attributes:
        launch: seconds from a launch to the first instruction, and from the last to the next launch.
        port: bytes a second that one multiprocessor receives from L2. All ports together receive less than L2
            can send, so the models have no term for L2.
        first_bytes: seconds from a wave's start until its first bytes arrive from device memory.
        latency: seconds from a request to its bytes once the ring is full.
        reduction: bytes of sums a second that a multiprocessor moves through shared memory and adds.
        remote: bytes a second at which a multiprocessor reads sums from shared memory of its cluster.
        barriers: seconds of two cluster barriers, at which blocks wait for each other's sums.
        barriers_block: seconds that each block of a cluster adds to ``barriers``.
    """

    launch: float = 7.8e-07
    port: float = 2e11
    first_bytes: float = 5.9e-07
    latency: float = 7.4e-07
    reduction: float = 2.3e10
    remote: float = 3.3e10
    barriers: float = 8.67e-07
    barriers_block: float = 4.67e-08

    def meeting(self, blocks: int) -> float:
        """Seconds in which a cluster of ``blocks`` blocks meets twice; 0 for one block."""
        return self.barriers + self.barriers_block * blocks if blocks > 1 else 0.0


PHYSICS = Physics()


def overlapped(times: Mapping[str, float], sharpness: float) -> tuple[float, str]:
    """Seconds of kinds of work that overlap, and the name of the longest.

    The p-norm of their times with p = ``sharpness``: 1 adds them, infinity takes the longest alone.
    """
    busiest = max(times, key=times.__getitem__)
    longest = times[busiest]
    total = 0.0
    for time in times.values():
        total += (time / longest) ** sharpness
    return longest * total ** (1 / sharpness), busiest


def resident_blocks(problem: Problem, device: Device, config: Configuration, registers: int) -> int:
    """Blocks that fit on a multiprocessor, by registers and shared memory.

    ``registers``: registers that a thread uses unless ``min_blocks`` of the configuration caps them.
    """
    registers = min(registers, registers_of_a_thread(config.threads // 32, config.min_blocks))
    room = (device.shared_bytes + 1024) // (config.shared_bytes(problem) + 1024)
    return max(config.min_blocks, min(room, REGISTERS // (registers * config.threads)))


@lru_cache(maxsize=4096)
def round_trip(customers: int, delay: float, stations: tuple[float, ...], collision: float) -> float:
    """Seconds that one of ``customers`` needs to pass all stations once; a station serves one at a time.

    Mean value analysis of a closed queue (Reiser and Lavenberg 1980). A customer that arrives at a station
    waits ``collision`` times the service time of the mean queue there with one customer fewer. Here customers
    are warps, and stations are schedulers and tensor cores.

    Args:
        customers: number of customers.
        delay: seconds a customer spends outside the stations.
        stations: seconds of service at each station.
        collision: share of the queue that an arrival waits for; 1 for exponentially distributed times.
    """
    queues = [0.0] * len(stations)
    trip = delay
    for number in range(1, customers + 1):
        stays = [time * (1 + collision * queue) for time, queue in zip(stations, queues, strict=True)]
        trip = max(delay + sum(stays), number * max(stations))
        queues = [number * stay / trip for stay in stays]
    return trip


def streaming_seconds(device: Device, load: Load, own: float, read: float) -> dict[str, float]:
    """Seconds that the bytes of a wave need, at the device memory and at a multiprocessor's port to L2.

    Args:
        device: GPU with the rates.
        load: the wave.
        own: bytes a block adds to the traffic of device memory; bytes that blocks share are divided by them.
        read: bytes a block reads from L2.
    """
    return {
        "device memory": load.grid * own / device.bandwidth,
        "the port": load.blocks * read / PHYSICS.port,
    }
