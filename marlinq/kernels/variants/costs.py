"""How the cost models put a kernel's work together: overlap, queues, and a wave's share of the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.device import Device, Load, registers_of_a_thread
from marlinq.kernels.contract.problem import Problem

# Of a multiprocessor.
SCHEDULERS = 4
REGISTERS = 65536


@dataclass(frozen=True)
class Physics:
    """What is the same for every kernel; the models' own constants are what these leave unexplained.

    Attributes:
        launch: seconds from a launch to the first instruction, and from the last to the next launch.
        port: bytes a second that one multiprocessor receives from L2. All ports of a GPU together take less
            than L2 gives, so L2 has no term of its own.
    """

    launch: float = 7.8e-07
    port: float = 2e11


PHYSICS = Physics()


def overlapped(times: Mapping[str, float], sharpness: float) -> tuple[float, str]:
    """Time of work that overlaps, and the longest share's name.

    The norm of the shares with exponent ``sharpness``: 1 would be their sum, infinity the longest alone.
    """
    busiest = max(times, key=times.__getitem__)
    longest = times[busiest]
    total = 0.0
    for time in times.values():
        total += (time / longest) ** sharpness
    return longest * total ** (1 / sharpness), busiest


def resident_blocks(problem: Problem, device: Device, config: Configuration, registers: int) -> int:
    """Blocks that a multiprocessor has room for; a thread takes ``registers``, or as many as it is given."""
    registers = min(registers, registers_of_a_thread(config.threads // 32, config.min_blocks))
    room = (device.shared_bytes + 1024) // (config.shared_bytes(problem) + 1024)
    return max(config.min_blocks, min(room, REGISTERS // (registers * config.threads)))


@lru_cache(maxsize=4096)
def round_trip(customers: int, delay: float, stations: tuple[float, ...], collision: float) -> float:
    """How long one of several customers takes to pass all stations once, where each serves one at a time.

    Mean value analysis of a closed queue (Reiser and Lavenberg 1980): who arrives waits for those that would
    stand there without him, ``collision`` of the time that they need: 1 for times that scatter.

    Args:
        customers: their number.
        delay: time of a customer beside the stations.
        stations: service times.
        collision: how much of a queue one waits for.
    """
    queues = [0.0] * len(stations)
    trip = delay
    for number in range(1, customers + 1):
        stays = [time * (1 + collision * queue) for time, queue in zip(stations, queues, strict=True)]
        trip = max(delay + sum(stays), number * max(stations))
        queues = [number * stay / trip for stay in stays]
    return trip


def streaming_seconds(device: Device, load: Load, own: float, read: float) -> dict[str, float]:
    """Seconds in which a wave's bytes arrive, at the device memory and at a multiprocessor's port.

    Args:
        device: GPU with the rates.
        load: the wave.
        own: bytes of device memory a block, shared ones once.
        read: bytes a block takes from L2.
    """
    return {
        "device memory": load.grid * own / device.bandwidth,
        "the port": load.blocks * read / PHYSICS.port,
    }
