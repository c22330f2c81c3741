"""The GPU that a decision is made for: its rates, its sizes, and the waves in which it runs a grid."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

# Partitions of a multiprocessor, and registers of each.
_PARTITIONS, _PARTITION_REGISTERS = 4, 16384
_MAX_CLUSTER = 8  # blocks; the largest cluster that every GPU with clusters can run


def registers_of_a_thread(warps: int, blocks: int) -> int:
    """Registers a thread may have where ``blocks`` blocks of ``warps`` warps share a multiprocessor.

    Warps are dealt out to four partitions, each with its own registers; the fullest partition sets the limit.
    """
    fullest = -(-warps * blocks // _PARTITIONS)
    return min(255, _PARTITION_REGISTERS // (32 * fullest) // 8 * 8)


class Load(NamedTuple):
    """Some equal waves of a grid; a wave is as many blocks as run at once.

    Attributes:
        waves: number of waves.
        blocks: blocks on the busiest multiprocessor during such a wave.
        grid: blocks of one wave.
    """

    waves: int
    blocks: int
    grid: int


@dataclass(frozen=True)
class Device:
    """Rates and sizes of a GPU, from which the cost models estimate times.

    Defaults are an H200's; :func:`device_of` fills them for the present GPU.

    Attributes:
        architecture: NVRTC's target, for example ``sm_90a``.
        multiprocessors: number of multiprocessors.
        shared_bytes: the most dynamic shared memory a block may have.
        bandwidth: bytes a second from device memory.
        cache_bandwidth: bytes a second from L2.
        cache_bytes: bytes of L2.
        clock: cycles a second of a multiprocessor under load.
        clusters: clusters of c = 1, 2, ... 8 blocks that run at once, [b - 1][c - 1], where b = 1, 2, 3
            blocks fit on a multiprocessor; empty: not asked of the driver, so estimated.
        name: name of the GPU, in lower case with hyphens, such as ``nvidia-h200``; empty for an invented one.
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
        """Numbers of blocks that a cluster may have; 1 alone before compute capability 9.0."""
        sizes = range(1, _MAX_CLUSTER + 1) if self.has_clusters else (1,)
        return tuple(size for size in sizes if self.resident_blocks(size, 1))

    def resident_blocks(self, cluster: int, blocks: int) -> int:
        """Blocks that run at once, in clusters of ``cluster``, with at most ``blocks`` a multiprocessor.

        A cluster stays inside one GPC (a group of about 16 multiprocessors, fewer in some). Sizes that don't
        divide a GPC leave multiprocessors idle: on an H200, clusters of three and more (docs/kernels.md,
        "Bandwidth and floor").
        """
        count = self._resident.get((cluster, blocks))
        if count is None:
            count = self._resident[cluster, blocks] = cluster * self._clusters_at_once(cluster, blocks)
        return count

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
        """Whether ``tiles`` clusters of ``cluster`` blocks run in one wave, ``blocks`` a multiprocessor."""
        return tiles * cluster <= self.resident_blocks(cluster, blocks)

    def loads(self, grid: int, cluster: int, blocks: int) -> list[Load]:
        """The waves that run a grid of ``grid`` blocks: the full ones, and a last one that is not full.

        The last wave puts the fewest blocks on a multiprocessor with which its clusters still run at once.
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
"""The GPU that the cost models were measured on; ``clusters`` as its driver reports them."""


class GpuProperties(NamedTuple):
    """Properties that the driver reports of a GPU, in its own units; 0 for those it does not know.

    Attributes:
        name: name of the GPU as the driver spells it.
        capability: the compute capability.
        multiprocessors: number of multiprocessors.
        shared_bytes: bytes of dynamic shared memory a block may have, at most.
        clock_khz: highest clock of a multiprocessor, in kHz.
        memory_clock_khz: highest clock of the memory, in kHz; it moves two bits a cycle and wire.
        memory_bus_bits: width of the memory bus in wires.
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


# Measured rates of an H200 over its driver's peaks: a clock of 1980 MHz, and 6144 wires at 3201 MHz.
_BANDWIDTH_SHARE = H200.bandwidth / (2 * 3_201_000e3 * 6144 / 8)
_CLOCK_SHARE = H200.clock / 1_980_000e3
_CACHE_BYTES_PER_CYCLE = H200.cache_bandwidth / (H200.multiprocessors * H200.clock)


def slug(name: str) -> str:
    """A GPU's name in lower case with hyphens: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def device_of(gpu: GpuProperties, clusters: tuple[tuple[int, ...], ...] = ()) -> Device:
    """The :class:`Device` of a GPU.

    An H200 has measured rates. Another GPU is taken to reach the same share of its peaks as an H200 of its
    own; where the driver reports 0, the H200's value stands in.

    Args:
        gpu: facts from the driver.
        clusters: :attr:`Device.clusters`.
    """
    major, minor = gpu.capability
    architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    name = slug(gpu.name)
    device = Device(architecture, gpu.multiprocessors, gpu.shared_bytes, clusters=clusters, name=name)
    # A MIG slice has the name, but fewer multiprocessors and less bandwidth.
    if (name, gpu.multiprocessors) == (H200.name, H200.multiprocessors):
        return replace(device, measured=True)
    clock = gpu.clock_khz * 1e3 * _CLOCK_SHARE or H200.clock
    peak = 2 * gpu.memory_clock_khz * 1e3 * gpu.memory_bus_bits / 8
    return replace(
        device,
        bandwidth=peak * _BANDWIDTH_SHARE or H200.bandwidth,
        cache_bandwidth=_CACHE_BYTES_PER_CYCLE * gpu.multiprocessors * clock,
        cache_bytes=gpu.cache_bytes or H200.cache_bytes,
        clock=clock,
    )
