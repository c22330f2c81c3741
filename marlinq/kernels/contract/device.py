"""The GPU that a decision is made for, and how it works off a grid of blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

_PARTITIONS, _PARTITION_REGISTERS = 4, 16384
_MAX_CLUSTER = 8  # that every GPU with clusters runs


def registers_of_a_thread(warps: int, blocks: int) -> int:
    """How many registers a thread may have where ``blocks`` blocks of ``warps`` warps share a multiprocessor.

    A multiprocessor deals warps out to four partitions that have their own registers: the fullest counts.
    """
    fullest = -(-warps * blocks // _PARTITIONS)
    return min(255, _PARTITION_REGISTERS // (32 * fullest) // 8 * 8)


class Load(NamedTuple):
    """Waves of blocks that are alike.

    Attributes:
        waves: their number.
        blocks: blocks on the busiest multiprocessor.
        grid: blocks of one wave.
    """

    waves: int
    blocks: int
    grid: int


@dataclass(frozen=True)
class Device:
    """The numbers of a GPU that decisions rest on.

    Rates and sizes are an H200's unless given; :func:`device_of` gives those of the GPU at hand.

    Attributes:
        architecture: NVRTC's target, for example ``sm_90a``.
        multiprocessors: their number.
        shared_bytes: the most dynamic shared memory a block may have.
        bandwidth: bytes a second from device memory.
        cache_bandwidth: bytes a second from L2.
        cache_bytes: bytes of L2.
        clock: cycles a second of a multiprocessor under load.
        clusters: how many clusters of 1, 2, ... 8 blocks run at once, by how many blocks (1, 2, 3) a
            multiprocessor has room for; empty where nobody asked the driver.
        name: name of the GPU, in lower case with hyphens, such as ``nvidia-h200``; empty where it is
            nobody's.
        measured: whether the cost models' constants were measured on this GPU.
    """

    architecture: str
    multiprocessors: int
    shared_bytes: int
    bandwidth: float = 4.5e12
    cache_bandwidth: float = 6.5e12
    cache_bytes: float = 6e7
    clock: float = 1.755e9
    clusters: tuple[tuple[int, ...], ...] = ()
    name: str = ""
    measured: bool = False

    @cached_property
    def capability(self) -> int:
        """Ten times the compute capability: 90 for 9.0."""
        return int("".join(filter(str.isdigit, self.architecture)))

    @property
    def has_clusters(self) -> bool:
        """Whether the blocks of a cluster can read each other's shared memory (9.0 and later)."""
        return self.capability >= 90

    @cached_property
    def cluster_sizes(self) -> tuple[int, ...]:
        """How many blocks a cluster may have; 1 alone before 9.0."""
        sizes = range(1, _MAX_CLUSTER + 1) if self.has_clusters else (1,)
        return tuple(size for size in sizes if self.resident_blocks(size, 1))

    def resident_blocks(self, cluster: int, blocks: int) -> int:
        """How many blocks run at once, in clusters of ``cluster``, with at most ``blocks`` a multiprocessor.

        A cluster stays inside one processing cluster of the chip, whose multiprocessors (16 or so, not the
        same number everywhere) larger clusters don't divide: of an H200's 132, clusters of four and more
        leave some idle (docs/kernels.md, "Bandwidth and floor").
        """
        found = self._resident.get((cluster, blocks))
        if found is None:
            found = self._resident[cluster, blocks] = cluster * self._clusters_at_once(cluster, blocks)
        return found

    @cached_property
    def _resident(self) -> dict[tuple[int, int], int]:
        return {}

    def _clusters_at_once(self, cluster: int, blocks: int) -> int:
        if self.clusters:
            known = self.clusters[min(blocks, len(self.clusters)) - 1][cluster - 1]
            return known * max(blocks, len(self.clusters)) // len(self.clusters)
        whole = self.multiprocessors * blocks // cluster
        return whole if cluster <= 2 else whole * 9 // 10

    def runs_at_once(self, tiles: int, cluster: int, blocks: int) -> bool:
        """Whether there is room for a cluster for every tile, ``blocks`` blocks a multiprocessor."""
        return tiles * cluster <= self.resident_blocks(cluster, blocks)

    def loads(self, grid: int, cluster: int, blocks: int) -> list[Load]:
        """How a grid is worked off.

        A wave that is not full keeps only some multiprocessors busy, with fewer blocks each: as few as there
        is room for the clusters.
        """
        resident = self.resident_blocks(cluster, blocks)
        waves, rest = divmod(grid, resident)
        loads = [Load(waves, blocks, resident)] if waves else []
        if rest:
            fewest = (b for b in range(1, blocks) if self.resident_blocks(cluster, b) >= rest)
            loads.append(Load(1, next(fewest, blocks), rest))
        return loads

    @property
    def has_warpgroups(self) -> bool:
        """Whether the GPU has wgmma (9.0 alone)."""
        return self.capability == 90


H200 = Device(
    "sm_90a",
    multiprocessors=132,
    shared_bytes=232_448,
    clusters=(
        (132, 66, 39, 30, 22, 17, 15, 15),
        (264, 132, 79, 62, 47, 39, 32, 30),
        (396, 198, 124, 92, 69, 62, 47, 45),
    ),
    name="nvidia-h200",
    measured=True,
)
"""The GPU that the cost models were measured on, and how many clusters its driver says it runs at once."""


class GpuProperties(NamedTuple):
    """What the driver says of a GPU, in its own units; 0 for what it does not know.

    Attributes:
        name: as the driver spells it.
        capability: the compute capability.
        multiprocessors: their number.
        shared_bytes: the most dynamic shared memory a block may have.
        clock_khz: the highest clock of a multiprocessor.
        memory_clock_khz: the highest clock of the memory, which moves two bits a cycle and wire.
        memory_bus_bits: its wires.
        cache_bytes: bytes of L2.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    cache_bytes: int


# What an H200's driver says, of which the measured numbers above are shares: 1980 MHz, and 6144 wires at
# 3201 MHz.
_BANDWIDTH_SHARE = H200.bandwidth / (2 * 3_201_000e3 * 6144 / 8)
_CLOCK_SHARE = H200.clock / 1_980_000e3
_CACHE_BYTES_PER_CYCLE = H200.cache_bandwidth / (H200.multiprocessors * H200.clock)


def slug(name: str) -> str:
    """A GPU's name in lower case with hyphens: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def device_of(gpu: GpuProperties, clusters: tuple[tuple[int, ...], ...] = ()) -> Device:
    """The numbers of a GPU.

    An H200's are measured. Of another GPU's peaks, the shares that an H200 reaches are taken; what the driver
    does not know is taken for an H200's.

    Args:
        gpu: facts from the driver.
        clusters: :attr:`Device.clusters`.
    """
    major, minor = gpu.capability
    architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    name = slug(gpu.name)
    found = Device(architecture, gpu.multiprocessors, gpu.shared_bytes, clusters=clusters, name=name)
    # A slice of one has fewer multiprocessors and another share of the memory.
    if (name, gpu.multiprocessors) == (H200.name, H200.multiprocessors):
        return replace(found, measured=True)
    clock = gpu.clock_khz * 1e3 * _CLOCK_SHARE or H200.clock
    peak = 2 * gpu.memory_clock_khz * 1e3 * gpu.memory_bus_bits / 8
    return replace(
        found,
        bandwidth=peak * _BANDWIDTH_SHARE or H200.bandwidth,
        cache_bandwidth=_CACHE_BYTES_PER_CYCLE * gpu.multiprocessors * clock,
        cache_bytes=gpu.cache_bytes or H200.cache_bytes,
        clock=clock,
    )
