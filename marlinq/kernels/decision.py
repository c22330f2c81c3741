"""Which kernel variant runs a problem, and why: a pure function of shapes and device numbers.

The model counts, for every candidate tile, the bytes and the tensor-core work of the busiest multiprocessor and adds
what a launch costs whatever its size. It needs no GPU, so a decision can be tested and explained anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from marlinq.errors import UnsupportedError

GROUP_SIZES = (32, 64, 128, -1)
_MAX_CLUSTER = 8


@dataclass(frozen=True)
class Device:
    """The numbers of a GPU that decisions rest on.

    ``architecture`` is what NVRTC compiles for; ``bandwidth`` is bytes a second from device memory, ``cache_bandwidth``
    from L2; ``tensor_rate`` is dense 16-bit mma.sync operations a second; ``shared_bytes`` is the most shared memory a
    block may have.
    """

    architecture: str
    multiprocessors: int
    shared_bytes: int
    bandwidth: float = 4.5e12
    cache_bandwidth: float = 6.5e12
    tensor_rate: float = 4.5e14

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can share memory across a cluster (compute capability 9.0 and 10.x, 12.x)."""
        return int("".join(filter(str.isdigit, self.architecture))) >= 90


@dataclass(frozen=True)
class Problem:
    """One GEMM: M rows of activations, a K x N weight, its grid, and the element type float16 or bfloat16."""

    m: int
    n: int
    k: int
    group_size: int
    zeros: bool
    bfloat16: bool


@dataclass(frozen=True)
class StreamConfig:
    """The compile-time parameters of the stream kernel (``cuda/w4a16_stream.cu``)."""

    warps_n: int
    warps_k: int
    blocks_m: int
    rows: int
    scale_sums: bool
    cluster: int
    stages: int
    min_blocks: int

    @property
    def tile_m(self) -> int:
        """Batch rows of a block."""
        return 8 * self.blocks_m

    @property
    def tile_n(self) -> int:
        """Output columns of a block."""
        return 64 * self.warps_n

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_n * self.warps_k

    @property
    def chunk(self) -> int:
        """Channels of K that a warp takes at a time."""
        return 16 * self.rows

    def shared_bytes(self, group: int, zeros: bool) -> int:
        """Dynamic shared memory of a block: the ring of stages, or the reduction buffer that follows it."""
        warps = self.warps_n * self.warps_k
        groups = 1 if group == 0 else max(1, self.chunk // group)
        stage = warps * self.rows * 512
        stage += self.warps_k * self.tile_m * self.chunk * 2
        stage += warps * groups * (2 if zeros else 1) * 128
        reduction = self.warps_k * self.tile_m * (self.tile_n + 4) * 4
        return max(self.stages * stage, reduction)


@dataclass(frozen=True)
class KernelDecision:
    """What will run and why.

    ``kernel`` is ``stream`` on a GPU and ``reference`` on the CPU; ``config`` and ``grid`` are None for the latter;
    ``seconds`` is the model's estimate.
    """

    kernel: str
    reason: str
    config: StreamConfig | None = None
    grid: int = 0
    seconds: float = 0.0


# Registers a thread that a variant needs to stay clear of spills, by BLOCKS_M (kernels/resources.csv).
_REGISTERS_NEEDED = {1: 96, 2: 128, 4: 128, 8: 240}
_REGISTERS = 65536
_WARPS = range(4, 17)


def _candidates(problem: Problem, device: Device) -> Iterator[StreamConfig]:
    blocks_m = next((b for b in (1, 2, 4) if 8 * b >= problem.m), 8)
    group = max(problem.group_size, 0)
    # Scaling sums takes a second set of accumulators and one product a group; it pays for few columns and long groups.
    scale_sums = blocks_m == 1 and group != 32
    registers = 240 if blocks_m == 4 and problem.zeros else _REGISTERS_NEEDED[blocks_m]
    rows = 4 if blocks_m == 8 else 8
    clusters = range(1, _MAX_CLUSTER + 1) if device.has_clusters else (1,)
    chunks = -(-problem.k // (16 * rows))
    for warps_n in range(1, 9):
        for warps_k in (1, 2, 3, 4, 6, 8, 12, 16):
            if warps_n * warps_k not in _WARPS:
                continue
            min_blocks = min(3, _REGISTERS // (registers * 32 * warps_n * warps_k))
            for blocks in range(1, min_blocks + 1):
                for cluster in clusters:
                    if cluster * warps_k > max(chunks, 4):
                        continue
                    for stages in (3, 4, 6):
                        yield StreamConfig(
                            warps_n, warps_k, blocks_m, rows, scale_sums, cluster, stages, blocks
                        )


def _estimate(problem: Problem, device: Device, config: StreamConfig) -> tuple[float, str, int]:
    tiles = -(-problem.n // config.tile_n) * -(-problem.m // config.tile_m)
    grid = tiles * config.cluster
    chunks = -(-problem.k // config.chunk)
    steps = -(-chunks // (config.cluster * config.warps_k))
    sms = device.multiprocessors
    # A wave that is not full keeps only some multiprocessors busy, with fewer blocks each.
    waves, rest = divmod(grid, config.min_blocks * sms)
    loads = [config.min_blocks] * waves + ([-(-rest // sms)] if rest else [])
    channels = steps * config.warps_k * config.chunk
    weights = channels * config.tile_n * (0.5 + 2 / _group(problem))
    activations = channels * min(config.tile_m, problem.m) * 2
    work = 2.0 * channels * config.tile_n * config.tile_m
    # Launch, the first bytes' way and the drain; every further wave pays the latter two again.
    seconds, busiest = 1.6e-6 + 0.8e-6 * (len(loads) - 1), ""
    for blocks in loads:
        # Too few bytes in flight can't fill the memory pipe: latency is about a microsecond under load.
        in_flight = blocks * config.threads * config.rows * 16 * (config.stages - 1)
        rate = min(device.bandwidth / sms, in_flight / 1.2e-6)
        times = {
            "weights": blocks * weights / rate,
            "activations": blocks * (weights + activations) / (device.cache_bandwidth / sms),
            "tensor cores": blocks * work / (device.tensor_rate / sms),
        }
        busiest = max(times, key=lambda name: times[name])
        seconds += times[busiest]
    reduced = min(config.tile_m, problem.m) * config.tile_n * 4 * config.warps_k
    # Larger clusters start later and wait for their slowest block (measured, docs/kernels/notes.md).
    seconds += reduced / 2.0e11 + 0.3e-6 * (config.cluster - 1)
    return seconds, busiest, grid


def _group(problem: Problem) -> int:
    return problem.k if problem.group_size == -1 else problem.group_size


@lru_cache(maxsize=4096)
def decide(problem: Problem, device: Device) -> KernelDecision:
    """The fastest variant by the model.

    Raises:
        UnsupportedError: K or N is not a multiple of 64, or the group size is not 32, 64, 128 or -1.
    """
    if problem.k % 64 or problem.n % 64:
        raise UnsupportedError(
            f"w4a16_gemm: K={problem.k} and N={problem.n} must be multiples of 64; pad the weight at load"
        )
    if problem.group_size not in GROUP_SIZES or (problem.group_size > 0 and problem.k % problem.group_size):
        raise UnsupportedError(
            f"w4a16_gemm: group size {problem.group_size} with K={problem.k}; expected 32, 64, 128 or -1, dividing K"
        )
    group = max(problem.group_size, 0)
    best: tuple[float, str, int, StreamConfig] | None = None
    for config in _candidates(problem, device):
        shared = config.shared_bytes(group, problem.zeros)
        if shared * config.min_blocks > device.shared_bytes:
            continue
        seconds, busiest, grid = _estimate(problem, device, config)
        if best is None or seconds < best[0]:
            best = (seconds, busiest, grid, config)
    if best is None:
        raise UnsupportedError(
            f"w4a16_gemm: no variant fits {device.shared_bytes} bytes of shared memory a block"
        )
    seconds, busiest, grid, config = best
    reason = (
        f"tile {config.tile_m}x{config.tile_n}, K split {config.cluster} (cluster) x {config.warps_k} (warps): "
        f"{grid} blocks on {device.multiprocessors} multiprocessors, bound by {busiest}, "
        f"about {seconds * 1e6:.1f} us"
    )
    return KernelDecision("stream", reason, config, grid, seconds)
