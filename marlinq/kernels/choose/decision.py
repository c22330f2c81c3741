"""Which kernel and configuration run a product, and why: a function of the product's shape and the GPU's
rates.

Each kernel estimates the seconds of its candidate configurations (``kernels/variants``); the least estimate
wins, unless a measured choice exists. No GPU is needed, so decisions can be tested and explained anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.choose import dequantized_estimate
from marlinq.kernels.choose.measured import measured_choice
from marlinq.kernels.contract.configuration import VARIANTS, Configuration, Variant
from marlinq.kernels.contract.demands import Demands, demands
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import GRANULARITIES, Problem

Estimated = tuple[float, str, Configuration]
"""Estimated seconds, name of the resource that bounds them, and the configuration."""

DEQUANTIZE = "dequantise"
"""The decision to write the dense weight to memory and let cuBLAS multiply."""
# Seconds that a kernel whose blocks all run at once saves in a chain of dependent launches; and the largest
# cluster with which it does. Larger clusters start late and delay the chain (docs/kernels.md, "Dependent
# launches").
_OVERLAP_SECONDS, _OVERLAP_CLUSTER = 1.7e-6, 2
# Small batches are rounded up to one of these before a kernel is chosen.
_FEW_ROWS = (1, 4, 8, 16, 32)
# Batches whose times are multiplied to choose the order of batch-invariant sums.
_TYPICAL_BATCHES = (1, 16, 64, 512)


@dataclass(frozen=True)
class KernelDecision:
    """The kernel and configuration chosen for a product, and why.

    Attributes:
        kernel: name of a registered kernel on a GPU, ``dequantise`` where cuBLAS multiplies with a
            dense weight, ``reference`` on the CPU.
        reason: text with tile, split of K, bounding resource and expected time.
        config: compile-time parameters; None where nothing is compiled.
        grid: blocks of a launch.
        seconds: seconds of a launch, measured or estimated.
    """

    kernel: str
    reason: str
    config: Configuration | None = None
    grid: int = 0
    seconds: float = 0.0


def decide(problem: Problem, device: Device) -> KernelDecision:
    """The kernel with the least measured or estimated time that meets the demands of the context
    (:mod:`marlinq.kernels.contract.demands`).

    Raises:
        UnsupportedError: K or N is not a multiple of 64, the granularity is none of GRANULARITIES, or no
            configuration fits the device.
    """
    return _decide(problem, device, demands()._replace(early=False), tuple(VARIANTS.values()))


@lru_cache(maxsize=8192)
def _decide(
    problem: Problem, device: Device, demanded: Demands, variants: tuple[Variant, ...]
) -> KernelDecision:
    # ``variants`` are arguments so that the cache notices a newly registered kernel.
    multiple = problem.format.channel_multiple
    if problem.k % multiple or problem.n % 64:
        raise UnsupportedError(
            f"{problem.format.operator}: K={problem.k} must be a multiple of {multiple} and N={problem.n} of "
            "64; pad the weight at load"
        )
    too_small = 0 < problem.quant_group < problem.format.smallest_group
    if too_small or problem.granularity not in GRANULARITIES or not problem.granularity.divides(problem.k):
        raise UnsupportedError(
            f"{problem.format.operator}: {problem.granularity.describe()} with K={problem.k}; "
            "expected one scale per channel, or groups of 32, 64 or 128 that divide K"
        )
    standing = replace(problem, m=bucket(problem.m))
    for_speed = demanded._replace(dependent=False) == Demands()
    measured = measured_choice(standing, device, demanded.dependent) if for_speed else None
    if measured is not None:
        config, seconds, bound = measured.config, measured.seconds, "measured on this GPU"
    else:
        dequantized = _dequantized(standing, device, demanded)
        if dequantized is not None:
            return dequantized
        seconds, busiest, config = model_choice(standing, device, demanded)
        bound = f"bound by {busiest}"
    grid = config.grid(problem)
    reason = (
        f"{config.describe()}: {grid} blocks on {device.multiprocessors} multiprocessors, {bound}, "
        f"about {seconds * 1e6:.1f} us"
    )
    if demanded.batch_invariant:
        reason += "; summed in the same order for every batch"
    if measured is None:
        reason += _unmeasured(device)
    return KernelDecision(config.variant, reason, config, grid, seconds)


def _unmeasured(device: Device) -> str:
    return "" if device.measured else "; unmeasured GPU: the model's constants are an H200's"


def _dequantized(problem: Problem, device: Device, demanded: Demands) -> KernelDecision | None:
    """The decision to dequantise; None where a kernel multiplies.

    Kernels without ``wgmma`` dequantise a weight again for every 64 rows of a batch, so for large batches it
    is faster to do it once. Never where batch invariance is demanded: cuBLAS promises no order of its sums.
    """
    seconds = dequantized_estimate.estimate(problem, device)
    if demanded.kernel == DEQUANTIZE:
        why = "asked for"
    elif not any(variant.takes(problem.format) for variant in VARIANTS.values()):
        why = f"no kernel has a codec for {problem.format.name}"
    elif demanded.kernel or demanded.batch_invariant or device.has_warpgroups:
        return None
    else:
        best = model_choice(problem, device, demanded)[0]
        if seconds > dequantized_estimate.MARGIN * best:
            return None
        why = f"the fastest kernel takes about {best * 1e6:.1f} us"
    reason = f"dequantised once, then cuBLAS: {why}, this about {seconds * 1e6:.1f} us{_unmeasured(device)}"
    return KernelDecision(DEQUANTIZE, reason, seconds=seconds)


def bucket(m: int) -> int:
    """The number of rows that ``m`` is rounded up to before a kernel is chosen.

    Nearly equal batches so share a configuration, and fewer are compiled.
    """
    if m <= _FEW_ROWS[-1]:
        return next(rows for rows in _FEW_ROWS if rows >= m)
    step = 16 if m <= 1024 else 64
    return -(-m // step) * step


def buckets(most: int) -> tuple[int, ...]:
    """All values of :func:`bucket` for up to ``most`` rows."""
    return tuple(sorted({bucket(m) for m in range(1, most + 1)}))


def model_choice(problem: Problem, device: Device, demanded: Demands) -> Estimated:
    """The configuration with the least estimate."""
    return _model_choice(problem, device, demanded, tuple(VARIANTS.values()))


@lru_cache(maxsize=1024)
def _model_choice(
    problem: Problem, device: Device, demanded: Demands, variants: tuple[Variant, ...]
) -> Estimated:
    candidates = _all_estimates(problem, device, demanded, variants)
    if demanded.batch_invariant:
        order = _invariant_order(replace(problem, m=1), device, demanded, variants)
        candidates = (candidate for candidate in candidates if candidate[2].order_of_sums(problem) == order)

    def cost(candidate: Estimated) -> float:
        seconds, _, config = candidate
        overlaps = demanded.dependent and gains_by_overlap(config)
        if overlaps and blocks_together(problem, device, config):
            return seconds - _OVERLAP_SECONDS
        return seconds

    best = min(candidates, key=cost, default=None)
    if best is None:
        raise UnsupportedError(
            f"{problem.format.operator}: no variant fits {device.architecture} with "
            f"{device.shared_bytes} bytes a block"
        )
    return best


def _all_estimates(
    problem: Problem, device: Device, demanded: Demands, variants: tuple[Variant, ...]
) -> Iterator[Estimated]:
    """Estimates of every candidate that can apply the problem's activation."""
    for variant in considered(problem, device, demanded, variants):
        common = [] if demanded.batch_invariant else list(variant.common_candidates(problem, device))
        for config in common or variant.candidates(problem, device, demanded.batch_invariant):
            if config.activates(problem):
                yield (*variant.estimate(problem, device, config), config)


def considered(
    problem: Problem, device: Device, demanded: Demands, variants: tuple[Variant, ...]
) -> list[Variant]:
    """Kernels that a decision compares."""
    able = [variant for variant in variants if variant.takes(problem.format)]
    if demanded.kernel is not None:
        return [variant for variant in able if variant.name == demanded.kernel]
    # Kernels sum in different orders, so one of them has to serve every batch.
    if demanded.batch_invariant:
        return [variant for variant in able if variant.any_batch]
    return [variant for variant in able if variant.suits(problem, device, dependent=demanded.dependent)]


def gains_by_overlap(config: Configuration) -> bool:
    """Whether a launch ends earlier for starting while its predecessor still runs."""
    return config.cluster <= _OVERLAP_CLUSTER


def blocks_together(problem: Problem, device: Device, config: Configuration) -> int | None:
    """Fewest blocks a multiprocessor with which all blocks of a launch run at once; None if they never do."""
    grid = config.grid(problem)
    fitting = range(1, config.min_blocks + 1)
    return next((b for b in fitting if grid <= device.resident_blocks(config.cluster, b)), None)


@lru_cache(maxsize=256)
def _invariant_order(
    problem: Problem, device: Device, demanded: Demands, variants: tuple[Variant, ...]
) -> tuple[object, ...]:
    """The order of sums with the least product of times over the typical batches; ``problem.m`` is
    ignored."""
    totals: dict[tuple[object, ...], float] = {}
    for number, m in enumerate(_TYPICAL_BATCHES):
        best: dict[tuple[object, ...], float] = {}
        typical = replace(problem, m=m)
        for seconds, _, config in _all_estimates(typical, device, demanded, variants):
            key = config.order_of_sums(typical)
            best[key] = min(seconds, best.get(key, math.inf))
        if number == 0:
            totals = {key: math.log(seconds) for key, seconds in best.items()}
        else:
            totals = {key: total + math.log(best[key]) for key, total in totals.items() if key in best}
    if not totals:
        raise UnsupportedError(
            f"{problem.format.operator}: no order of summation serves every batch on {device.architecture}"
        )
    return min(totals, key=lambda key: totals[key])


def available(device: Device) -> tuple[str, ...]:
    """Names of the kernels that ``device`` can run."""
    return tuple(name for name, variant in VARIANTS.items() if variant.runs_on(device))


def estimates(
    problem: Problem, device: Device, kernel: str, batch_invariant: bool = False
) -> Iterator[Estimated]:
    """Estimates of every candidate of a kernel; with ``batch_invariant`` of those that exist for every M."""
    variant = VARIANTS[kernel]
    for config in variant.candidates(problem, device, batch_invariant):
        yield (*variant.estimate(problem, device, config), config)
