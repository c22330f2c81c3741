"""Which kernel variant runs a problem, and why: a pure function of shapes and device numbers.

A cost model counts, for every candidate tile, the bytes and the tensor-core work of the busiest
multiprocessor and adds what a launch costs whatever its size. It needs no GPU, so a decision can be tested
and explained anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.choose import dequantized
from marlinq.kernels.choose.measured import tuned
from marlinq.kernels.contract.demands import KERNELS, Demands, Kernel, demands
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import GROUP_SIZES, Problem
from marlinq.kernels.variants import bulk, stream, warpgroup
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup import WarpgroupConfig

KernelConfig = StreamConfig | BulkConfig | WarpgroupConfig
"""The compile-time parameters of any kernel."""

DEQUANTIZE = "dequantise"
"""The decision to write the dense weight to memory and let cuBLAS multiply."""
# Batches that a kernel is considered for beside others. The bulk kernel has no larger tile. The warpgroup
# kernel lost on all measured layers at 16 rows, so fewer than nine were not tried; from 17 on it is always
# expected to win, and from 33 on it did (docs/kernels.md, "Which kernel at which batch").
_BULK_MOST, _WARPGROUP_LEAST, _STREAM_MOST = 16, 9, 16
# What a kernel whose blocks run all at once saves in a chain of dependent launches, unless its clusters are
# larger than this, which start late and hold the chain up (docs/kernels.md, "Dependent launches").
_OVERLAP_SECONDS, _OVERLAP_CLUSTER = 1.7e-6, 2
# Batches up to the last of these are decided for as the next of them.
_FEW_ROWS = (1, 4, 8, 16, 32)
# The batches whose speed decides in which order a batch-invariant sum is taken.
_TYPICAL_BATCHES = (1, 16, 64, 512)


@dataclass(frozen=True)
class KernelDecision:
    """What will run and why.

    Attributes:
        kernel: ``stream``, ``bulk`` or ``warpgroup`` on a GPU, ``dequantise`` where cuBLAS multiplies with a
            dense weight, ``reference`` on the CPU.
        reason: the tile, the split, what bounds it, the expected time.
        config: the compile-time parameters; None where nothing is compiled.
        grid: blocks of a launch.
        seconds: the model's estimate.
    """

    kernel: str
    reason: str
    config: KernelConfig | None = None
    grid: int = 0
    seconds: float = 0.0


def decide(problem: Problem, device: Device) -> KernelDecision:
    """The fastest variant by the model that meets the demands of the context.

    Raises:
        UnsupportedError: K or N is not a multiple of 64, the group size is not 32, 64, 128 or -1, or
        nothing fits.
    """
    return _decide(problem, device, demands())


@lru_cache(maxsize=8192)
def _decide(problem: Problem, device: Device, demanded: Demands) -> KernelDecision:
    if problem.k % 64 or problem.n % 64:
        raise UnsupportedError(
            f"{problem.format.operator}: K={problem.k} and N={problem.n} must be multiples of 64; "
            "pad the weight at load"
        )
    if problem.group_size not in GROUP_SIZES or (problem.quant_group and problem.k % problem.quant_group):
        raise UnsupportedError(
            f"{problem.format.operator}: group size {problem.group_size} with K={problem.k}; "
            "expected 32, 64, 128 or -1, dividing K"
        )
    standing = replace(problem, m=bucket(problem.m))
    for_speed = demanded._replace(dependent=False) == Demands()
    measured = tuned(standing, device, demanded.dependent) if for_speed else None
    if measured is not None:
        config, seconds, bound = measured.config, measured.seconds, "measured on this GPU"
    else:
        dequantized = _dequantized(standing, device, demanded)
        if dequantized is not None:
            return dequantized
        seconds, busiest, config = model_choice(standing, device, demanded)
        bound = f"bound by {busiest}"
    grid = config.grid(problem)
    split = f"K in {config.parts} parts over {config.cluster} blocks"
    if isinstance(config, WarpgroupConfig) and config.stream_k:
        split = "stream-K"
    tile = f"tile {config.tile_m}x{config.tile_n}"
    if isinstance(config, StreamConfig) and config.digits:
        tile += " by integer digits"
    reason = (
        f"{tile}, {split}: "
        f"{grid} blocks on {device.multiprocessors} multiprocessors, {bound}, "
        f"about {seconds * 1e6:.1f} us"
    )
    if demanded.batch_invariant:
        reason += "; summed in the same order for every batch"
    if measured is None:
        reason += _unmeasured(device)
    return KernelDecision(_kernel_of(config), reason, config, grid, seconds)


def _unmeasured(device: Device) -> str:
    return "" if device.measured else "; unmeasured GPU: the model's constants are an H200's"


def _dequantized(problem: Problem, device: Device, demanded: Demands) -> KernelDecision | None:
    """The decision to dequantise; None where a kernel multiplies.

    The kernels without ``wgmma`` dequantise a weight again for every 64 rows of a batch, so from some batch
    on it is faster to do it once. The order of cuBLAS's sums is nobody's to promise.
    """
    seconds = dequantized.estimate(problem, device)
    if demanded.kernel == DEQUANTIZE:
        why = "asked for"
    elif not problem.format.kernels:
        why = f"no kernel has a codec for {problem.format.name}"
    elif demanded.kernel or demanded.batch_invariant or device.has_warpgroups:
        return None
    else:
        best = model_choice(problem, device, demanded)[0]
        if seconds > dequantized.MARGIN * best:
            return None
        why = f"the fastest kernel takes about {best * 1e6:.1f} us"
    reason = f"dequantised once, then cuBLAS: {why}, this about {seconds * 1e6:.1f} us{_unmeasured(device)}"
    return KernelDecision(DEQUANTIZE, reason, seconds=seconds)


def bucket(m: int) -> int:
    """The batch that decides for ``m`` rows, so that nearly equal batches share a variant: the next multiple
    of the finest tile's height that is worth a variant of its own."""
    if m <= _FEW_ROWS[-1]:
        return next(rows for rows in _FEW_ROWS if rows >= m)
    step = 16 if m <= 1024 else 64
    return -(-m // step) * step


def buckets(most: int) -> tuple[int, ...]:
    """The batches that decide for all of up to ``most`` rows."""
    return tuple(sorted({bucket(m) for m in range(1, most + 1)}))


@lru_cache(maxsize=1024)
def model_choice(problem: Problem, device: Device, demanded: Demands) -> tuple[float, str, KernelConfig]:
    """What the cost models expect to be fastest: seconds, what bounds it, and the variant."""
    found = _all_estimates(problem, device, demanded)
    if demanded.batch_invariant:
        order = _invariant_order(replace(problem, m=1), device, demanded)
        found = (candidate for candidate in found if _order(problem, candidate[2]) == order)

    def cost(candidate: tuple[float, str, KernelConfig]) -> float:
        seconds, _, config = candidate
        overlaps = demanded.dependent and gains_by_overlap(config)
        if overlaps and blocks_together(problem, device, config):
            return seconds - _OVERLAP_SECONDS
        return seconds

    best = min(found, key=cost, default=None)
    if best is None:
        raise UnsupportedError(
            f"{problem.format.operator}: no variant fits {device.architecture} with "
            f"{device.shared_bytes} bytes a block"
        )
    return best


def activates(problem: Problem, config: KernelConfig) -> bool:
    """Whether a variant can do what the problem wants behind the product: a block needs gate and up of the
    same columns, whose sums meet in its shared memory."""
    if problem.activation is None:
        return True
    if isinstance(config, BulkConfig) or (isinstance(config, WarpgroupConfig) and config.pushes):
        return False
    return config.tile_n % 128 == 0 and problem.n % 128 == 0


def _all_estimates(
    problem: Problem, device: Device, demanded: Demands
) -> Iterator[tuple[float, str, KernelConfig]]:
    found = _any_estimates(problem, device, demanded)
    return (candidate for candidate in found if activates(problem, candidate[2]))


def _any_estimates(
    problem: Problem, device: Device, demanded: Demands
) -> Iterator[tuple[float, str, KernelConfig]]:
    for kernel in considered(problem, device, demanded):
        found = 0
        # Servers pad to powers of two. Any other batch takes what serves many, or a model would need a
        # hundred variants.
        if kernel == "warpgroup" and problem.m > _FEW_ROWS[-1] and problem.m.bit_count() > 1:
            for config in warpgroup.common(problem, device) if not demanded.batch_invariant else ():
                found += 1
                yield (*warpgroup.estimate(problem, device, config), config)
        if not found:
            yield from estimates(problem, device, kernel, demanded.batch_invariant)


def considered(problem: Problem, device: Device, demanded: Demands) -> tuple[Kernel, ...]:
    """The kernels to choose from, all of which suit the batch."""
    codecs = [kernel for kernel in KERNELS if kernel in problem.format.kernels]
    if demanded.kernel is not None:
        return tuple(kernel for kernel in codecs if kernel == demanded.kernel)
    # Kernels take their sums in different orders, and only this one has tiles for every batch everywhere.
    if demanded.batch_invariant:
        return tuple(kernel for kernel in codecs if kernel == "stream")
    found: list[Kernel] = []
    if problem.m <= _STREAM_MOST or not device.has_warpgroups:
        found.append("stream")
    # The bulk kernel would run on later GPUs too, where nobody has measured it. In chains it lost in every
    # place with as many stages as fit (docs/kernels.md, "Dependent launches"); where it wins with
    # fewer, that is recorded.
    if problem.m <= _BULK_MOST and device.has_warpgroups and not demanded.dependent:
        found.append("bulk")
    if problem.m >= _WARPGROUP_LEAST and device.has_warpgroups:
        found.append("warpgroup")
    return tuple(kernel for kernel in found if kernel in codecs)


def gains_by_overlap(config: KernelConfig) -> bool:
    """Whether a variant is the sooner done for starting while its predecessor still runs."""
    return config.cluster <= _OVERLAP_CLUSTER


def blocks_together(problem: Problem, device: Device, config: KernelConfig) -> int | None:
    """The fewest blocks a multiprocessor with which all of a launch run at once; None if they never do."""
    grid = config.grid(problem)
    fitting = range(1, config.min_blocks + 1)
    return next((b for b in fitting if grid <= device.resident_blocks(config.cluster, b)), None)


def _order(problem: Problem, config: KernelConfig) -> tuple[object, ...]:
    """What decides in which order, and with which roundings, a sum is taken."""
    if isinstance(config, StreamConfig):
        return "stream", config.parts, config.rows, config.scale_sums
    if isinstance(config, BulkConfig):
        return "bulk", config.cluster, config.parts, config.rows, config.blocks_m == 1
    return "warpgroup", config.cluster, config.parts, config.rows, config.scaling(problem)


@lru_cache(maxsize=256)
def _invariant_order(problem: Problem, device: Device, demanded: Demands) -> tuple[object, ...]:
    """The order with the best product of times over the typical batches; ``problem.m`` means nothing."""
    totals: dict[tuple[object, ...], float] = {}
    for number, m in enumerate(_TYPICAL_BATCHES):
        best: dict[tuple[object, ...], float] = {}
        typical = replace(problem, m=m)
        for seconds, _, config in _all_estimates(typical, device, demanded):
            key = _order(typical, config)
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


def _kernel_of(config: KernelConfig) -> Kernel:
    if isinstance(config, StreamConfig):
        return "stream"
    return "bulk" if isinstance(config, BulkConfig) else "warpgroup"


def available(device: Device) -> tuple[Kernel, ...]:
    """The kernels that ``device`` can run."""
    needs = {"stream": True, "bulk": device.has_clusters, "warpgroup": device.has_warpgroups}
    return tuple(kernel for kernel in KERNELS if needs[kernel])


def estimates(
    problem: Problem, device: Device, kernel: Kernel, batch_invariant: bool = False
) -> Iterator[tuple[float, str, KernelConfig]]:
    """Every candidate of a kernel with its expected seconds and what bounds it.

    With ``batch_invariant`` those whose roundings and splits of K exist for every M.
    """
    match kernel:
        case "stream":
            for narrow in stream.candidates(problem, device, batch_invariant):
                yield (*stream.estimate(problem, device, narrow), narrow)
        case "bulk":
            for copied in bulk.candidates(problem, device, batch_invariant):
                yield (*bulk.estimate(problem, device, copied), copied)
        case "warpgroup":
            for wide in warpgroup.candidates(problem, device, batch_invariant):
                yield (*warpgroup.estimate(problem, device, wide), wide)
