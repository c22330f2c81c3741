"""Which kernel variant runs a problem, and why: a pure function of shapes and device numbers.

A cost model counts, for every candidate tile, the bytes and the tensor-core work of the busiest
multiprocessor and adds what a launch costs whatever its size. It needs no GPU, so a decision can be tested
and explained anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Literal

from marlinq.errors import UnsupportedError
from marlinq.kernels import bulk, stream, warpgroup
from marlinq.kernels.bulk import BulkConfig
from marlinq.kernels.problem import GROUP_SIZES, Device, Problem
from marlinq.kernels.stream import StreamConfig
from marlinq.kernels.warpgroup import WarpgroupConfig

KernelConfig = StreamConfig | BulkConfig | WarpgroupConfig
"""The compile-time parameters of any kernel."""

Kernel = Literal["stream", "bulk", "warpgroup"]
KERNELS: tuple[Kernel, ...] = ("stream", "bulk", "warpgroup")
# The kernels that are chosen when none is asked for; the others join when their speed has been measured.
_CHOSEN: tuple[Kernel, ...] = ("stream",)

_LARGEST_TILE = 64  # rows of activations a block of the stream kernel

_forced: ContextVar[Kernel | None] = ContextVar("marlinq_forced_kernel", default=None)


@dataclass(frozen=True)
class KernelDecision:
    """What will run and why.

    Attributes:
        kernel: ``stream``, ``bulk`` or ``warpgroup`` on a GPU, ``reference`` on the CPU.
        reason: the tile, the split, what bounds it, the expected time.
        config: the compile-time parameters; None for the reference.
        grid: blocks of a launch.
        seconds: the model's estimate.
    """

    kernel: str
    reason: str
    config: KernelConfig | None = None
    grid: int = 0
    seconds: float = 0.0


@contextmanager
def forced_kernel(kernel: Kernel) -> Iterator[None]:
    """Decide for ``kernel`` inside, whatever the model says: for tests and measurements."""
    token = _forced.set(kernel)
    try:
        yield
    finally:
        _forced.reset(token)


def decide(problem: Problem, device: Device) -> KernelDecision:
    """The fastest variant by the model, of the forced kernel where one is forced.

    Raises:
        UnsupportedError: K or N is not a multiple of 64, the group size is not 32, 64, 128 or -1, or
        nothing fits.
    """
    return _decide(problem, device, _forced.get())


@lru_cache(maxsize=8192)
def _decide(problem: Problem, device: Device, forced: Kernel | None) -> KernelDecision:
    if problem.k % 64 or problem.n % 64:
        raise UnsupportedError(
            f"w4a16_gemm: K={problem.k} and N={problem.n} must be multiples of 64; pad the weight at load"
        )
    if problem.group_size not in GROUP_SIZES or (problem.group and problem.k % problem.group):
        raise UnsupportedError(
            f"w4a16_gemm: group size {problem.group_size} with K={problem.k}; "
            "expected 32, 64, 128 or -1, dividing K"
        )
    # Prompts have any length; those that fill the same tiles share a decision.
    rows = problem.m if problem.m <= _LARGEST_TILE else -(-problem.m // _LARGEST_TILE) * _LARGEST_TILE
    seconds, busiest, config = _fastest(replace(problem, m=rows), device, forced)
    grid = config.grid(problem)
    reason = (
        f"tile {config.tile_m}x{config.tile_n}, K in {config.parts} parts over {config.cluster} blocks: "
        f"{grid} blocks on {device.multiprocessors} multiprocessors, bound by {busiest}, "
        f"about {seconds * 1e6:.1f} us"
    )
    return KernelDecision(_kernel_of(config), reason, config, grid, seconds)


@lru_cache(maxsize=1024)
def _fastest(problem: Problem, device: Device, forced: Kernel | None) -> tuple[float, str, KernelConfig]:
    kernels = (forced,) if forced else _CHOSEN
    best = min(
        (candidate for kernel in kernels for candidate in estimates(problem, device, kernel)),
        key=itemgetter(0),
        default=None,
    )
    if best is None:
        raise UnsupportedError(
            f"w4a16_gemm: no variant fits {device.architecture} with {device.shared_bytes} bytes a block"
        )
    return best


def _kernel_of(config: KernelConfig) -> Kernel:
    if isinstance(config, StreamConfig):
        return "stream"
    return "bulk" if isinstance(config, BulkConfig) else "warpgroup"


def available(device: Device) -> tuple[Kernel, ...]:
    """The kernels that ``device`` can run."""
    needs = {"stream": True, "bulk": device.has_clusters, "warpgroup": device.has_warpgroups}
    return tuple(kernel for kernel in KERNELS if needs[kernel])


def estimates(problem: Problem, device: Device, kernel: Kernel) -> Iterator[tuple[float, str, KernelConfig]]:
    """Every candidate of a kernel with its expected seconds and what bounds it."""
    match kernel:
        case "stream":
            for narrow in stream.candidates(problem, device):
                yield (*stream.estimate(problem, device, narrow), narrow)
        case "bulk":
            for copied in bulk.candidates(problem, device):
                yield (*bulk.estimate(problem, device, copied), copied)
        case "warpgroup":
            for wide in warpgroup.candidates(problem, device):
                yield (*warpgroup.estimate(problem, device, wide), wide)
