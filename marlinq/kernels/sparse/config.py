"""Host side of the sparse kernel: configurations, resources, and the choice among them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.instantiation import Instantiation

GROUPS = (Granularity.group(64), Granularity.group(128), Granularity.channel())
"""Granularities that the sparse kernel takes."""
CHUNK = 128
"""Channels of a chunk, which fills a stage of the ring."""

_SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))
_STAGES = (3, 4, 6)
_CLUSTERS = (1, 2, 4)
# Batch rows up to which sums are scaled; in larger tiles weights are, since a second set of sums does not fit
# the registers.
_SCALED_SUMS = 32
# Registers of a thread at most, by blocks of eight batch rows (tests/kernels/test_sparse.py).
REGISTERS = {1: 144, 2: 208, 4: 216, 8: 240}
# From compute capability 10.0 on, tiles have at most two blocks of eight batch rows: NVRTC 13.0 spills
# registers of larger ones.
_NEWER, _NEWER_BLOCKS = 100, 2
_REGISTER_FILE, _LEAST_SHARED = 65536, 1024
# Bytes in flight to a multiprocessor that reach its share of the bandwidth; seconds of a launch; seconds to
# add sums in a cluster. Taken from the dense stream kernel, not measured for this one.
_ENOUGH_BYTES, _LAUNCH, _CLUSTER = 40_000, 2e-6, 0.9e-6


class SparseArguments(ctypes.Structure):
    """The parameters of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "words", "masks", "scales", "bias", "out")),
        *((name, ctypes.c_int) for name in ("m", "n", "k")),
        ("x_stride", ctypes.c_longlong),
        ("out_stride", ctypes.c_longlong),
        ("dependent", ctypes.c_int),
    )


@dataclass(frozen=True)
class SparseConfig:
    """The compile-time parameters of the sparse kernel (``cuda/sparse/stream.cuh``).

    Attributes:
        warps_n: warps side by side in N, each with 64 columns.
        warps_k: warps that split the block's slice of K.
        blocks_m: eights of batch rows in a tile: 1, 2, 4 or 8.
        cluster: blocks that share a tile, each with a slice of K.
        stages: stages of a warp's ring in shared memory.
    """

    warps_n: int
    warps_k: int
    blocks_m: int
    cluster: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_n * self.warps_k

    @property
    def tile_m(self) -> int:
        """Batch rows of a block."""
        return 8 * self.blocks_m

    def stage_bytes(self, granularity: Granularity) -> int:
        """Bytes of a stage of the ring."""
        groups = 2 if granularity.channels == 64 else 1
        warp = CHUNK // 32 * (512 + 256) + 128 * groups
        return self.warps_n * self.warps_k * warp + self.warps_k * self.tile_m * CHUNK * 2

    def shared_bytes(self, granularity: Granularity) -> int:
        """Bytes of dynamic shared memory of a block."""
        reduction = self.warps_k * self.tile_m * (64 * self.warps_n + 4) * 4
        return max(self.stages * self.stage_bytes(granularity), reduction)

    def grid(self, m: int, n: int) -> int:
        """Blocks of a launch."""
        return -(-m // self.tile_m) * -(-n // (64 * self.warps_n)) * self.cluster

    def instantiation(self, granularity: Granularity, bfloat16: bool) -> Instantiation:
        """The kernel with this configuration."""
        parameters = (
            ("Element", "Bfloat16" if bfloat16 else "Half"),
            ("WARPS_N", self.warps_n),
            ("WARPS_K", self.warps_k),
            ("BLOCKS_M", self.blocks_m),
            ("QUANT_GROUP", granularity.channels),
            ("SCALE_SUMS", self.tile_m <= _SCALED_SUMS),
            ("CLUSTER", self.cluster),
            ("STAGES", self.stages),
            ("SHARED_BYTES", self.shared_bytes(granularity)),
        )
        return Instantiation("sparse/stream.cuh", "w4a16_sparse", parameters)

    def resident(self, device: Device, granularity: Granularity) -> int:
        """Blocks that a multiprocessor runs at once; 0 where one does not fit."""
        shared = self.shared_bytes(granularity) + _LEAST_SHARED
        by_registers = _REGISTER_FILE // (REGISTERS[self.blocks_m] * self.threads)
        return min(device.shared_bytes // shared, by_registers, 2048 // self.threads)

    def seconds(self, m: int, n: int, k: int, device: Device, granularity: Granularity) -> float:
        """Estimated seconds of a product, from bytes alone; not fitted to measurements."""
        resident = self.resident(device, granularity)
        places = device.multiprocessors * resident
        blocks = self.grid(m, n)
        waves = -(-blocks // places)
        steps = -(-k // (CHUNK * self.warps_k * self.cluster))
        stage = self.stage_bytes(granularity)
        busy = min(blocks, places) / device.multiprocessors
        in_flight = busy * stage * (self.stages - 1)
        bandwidth = device.bandwidth * min(1.0, in_flight / _ENOUGH_BYTES)
        wave_bytes = min(blocks, places) * stage * steps
        return waves * (wave_bytes / bandwidth + _LAUNCH) + _CLUSTER * (self.cluster > 1)


def largest_tile(capability: int) -> int:
    """Eights of batch rows in the largest tile; ``capability`` is ten times the compute capability."""
    return _NEWER_BLOCKS if capability >= _NEWER else 8


def candidates(m: int, k: int, device: Device, granularity: Granularity) -> Iterator[SparseConfig]:
    """The configurations that suit a batch of ``m`` rows on a device."""
    most = largest_tile(device.capability)
    blocks_m = next((each for each in (1, 2, 4) if 8 * each >= m or each == most), most)
    for warps_n, warps_k in _SHAPES:
        for cluster in _CLUSTERS if device.has_clusters else (1,):
            if warps_k * cluster > -(-k // CHUNK):
                continue
            for stages in _STAGES:
                config = SparseConfig(warps_n, warps_k, blocks_m, cluster, stages)
                if config.resident(device, granularity):
                    yield config


def choose(m: int, n: int, k: int, device: Device, granularity: Granularity) -> SparseConfig:
    """The configuration with the least estimate."""
    return min(
        candidates(m, k, device, granularity),
        key=lambda config: (config.seconds(m, n, k, device, granularity), config.threads, config.stages),
    )
