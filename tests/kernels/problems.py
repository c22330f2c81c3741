"""Random problems for the kernel tests: operands in the kernel's layout and the exact weight in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4 as INT4_ELEMENT
from marlinq.core.scheme import INT8 as INT8_ELEMENT
from marlinq.formats.layouts.marlin import permute_scales
from marlinq.kernels import Device, Operand, Problem
from marlinq.kernels.contract.weight_formats import INT4, INT4_SPARSE, WeightFormat
from marlinq.kernels.variants import warpgroup, warpgroup_costs
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig

# Relative error of the result against float64 (Frobenius norms). Outputs are rounded to 11 and 8 significant
# bits, which alone gives 2^-11 / sqrt(3) = 2.8e-4 for float16 and 2^-8 / sqrt(3) = 2.3e-3 for bfloat16;
# weights scaled in 16 bits add as much again, independently.
BOUND = {torch.float16: 1e-3, torch.bfloat16: 5e-3}


_ELEMENTS = {each.name: each for each in (INT4_ELEMENT, INT8_ELEMENT, E4M3, E2M1)}
_ELEMENTS[INT4_SPARSE.name] = INT4_ELEMENT


_SUBNORMAL_STEP = 2.0**-24
"""distance of float16's subnormal numbers"""


@dataclass
class Operands:
    """Operands of one layer; ``weight`` is float64 [K, N]."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    group_size: int
    weight: Tensor
    format: WeightFormat = INT4

    @property
    def operand(self) -> Operand:
        """The weight as kernels take it."""
        granularity = Granularity.from_group_size(self.group_size)
        return Operand.whole(self.format, granularity, self.words, self.scales, self.zeros)

    def reference(self, x: Tensor) -> Tensor:
        """The float64 result for ``x`` [M, K]."""
        out = x.double() @ self.weight
        return out if self.bias is None else out + self.bias.double()


def bound_of(made: Operands) -> float:
    """Relative error that rounding may cause: that of results, and of subnormal float16 weights."""
    dtype = made.scales.dtype
    if dtype != torch.float16:
        return BOUND[dtype]
    used = made.weight[made.weight != 0]
    size = float(used.square().mean().sqrt()) if used.numel() else 1.0
    return math.hypot(BOUND[dtype], _SUBNORMAL_STEP / math.sqrt(12) / size)


SPREADS = ("even", "small", "any order", "growing", "sparse", "late")
"""How the sizes of a column's scales differ from group to group: kernels that normalise them care."""


def _factors(spread: str, groups: int, n: int, device: str) -> Tensor:
    """Factors for scales [G, N] of one size."""
    if spread == "small":
        # Most of them subnormal float16.
        return torch.full((groups, n), 2.0**-12, device=device)
    if spread == "any order":
        return torch.exp2(torch.randint(-6, 7, (groups, n), device=device).float())
    group = torch.arange(groups, device=device).float()[:, None]
    if spread == "growing":
        return torch.exp2(torch.floor(14 * group / groups) - 7).expand(groups, n)
    if spread == "sparse":
        return (torch.rand(groups, n, device=device) < 0.4).float()
    if spread == "late":
        return (group >= groups // 2).float().expand(groups, n)
    assert spread == "even", spread
    return torch.ones(groups, n, device=device)


def random_operands(
    k: int,
    n: int,
    group_size: int,
    dtype: torch.dtype,
    *,
    zeros: bool = False,
    bias: bool = False,
    spread: str = "even",
    silent: Sequence[int] = (),
    device: str = "cuda",
    weight_format: WeightFormat = INT4,
) -> Operands:
    """Random codes, scales of both signs, zero points over the whole range.

    Scales of a column differ by a factor of three at most, times what ``spread``, of :data:`SPREADS`, says.
    The weights of ``silent`` channels are zero.
    """
    groups = 1 if group_size == -1 else k // group_size
    element = _ELEMENTS[weight_format.name]
    codes = torch.randint(0, element.codes, (k, n), dtype=torch.uint8, device=device)
    if element.table is not None:
        codes[element.decode(codes).isnan()] = 0
    if weight_format.sparsity is not None:
        kept = weight_format.sparsity.largest(torch.rand(k, n, device=device))
        codes = torch.where(kept, codes, int(element.midpoint))
    signs = torch.randint(0, 2, (groups, n), device=device) * 2 - 1
    scales = (torch.rand(groups, n, device=device) + 0.5) * 0.02 * signs
    scales = (scales * _factors(spread, groups, n, device)).to(dtype)
    # Values of eight bits are sixteen times as large.
    scales /= element.codes / 16
    points = torch.randint(0, element.codes, (groups, n), device=device).to(dtype) if zeros else None
    for channel in silent:
        codes[channel] = (
            element.midpoint if points is None else points[channel // (k // groups)].to(torch.uint8)
        )
    offset = weight_format.midpoint if points is None else points.double()[:, None]
    values = element.decode(codes).double().reshape(groups, k // groups, n)
    weight = (values - offset) * scales.double()[:, None]
    return Operands(
        words=weight_format.pack(codes),
        scales=permute_scales(scales * weight_format.scale_factor(dtype)),
        zeros=None if points is None else permute_scales(points),
        bias=torch.randn(n, device=device).to(dtype) if bias else None,
        group_size=group_size,
        weight=weight.reshape(k, n),
        format=weight_format,
    )


def int4_problem(
    m: int,
    n: int,
    k: int,
    group_size: int,
    zeros: bool,
    bfloat16: bool,
    weight_format: WeightFormat = INT4,
    activation: str | None = None,
) -> Problem:
    """A product with groups of ``group_size`` channels, -1 for one scale per channel."""
    granularity = Granularity.from_group_size(group_size)
    return Problem(m, n, k, granularity, zeros, bfloat16, weight_format, activation)


def even_splits(problem: Problem, device: Device) -> list[WarpgroupConfig]:
    """The variants of the warpgroup kernel that deal tiles out in chunks, the fastest by the model first."""
    found = [config for config in warpgroup.candidates(problem, device) if config.stream_k]
    return sorted(found, key=lambda config: warpgroup_costs.estimate(problem, device, config)[0])


def tile_after_tile(problem: Problem, device: Device, blocks: int) -> list[WarpgroupConfig]:
    """The variants of the warpgroup kernel that store tiles apart where ``blocks`` blocks run at once."""
    small = replace(device, multiprocessors=blocks, clusters=())
    return [config for config in warpgroup.candidates(problem, small) if config.has_store_warps(problem)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; NaN when anything found is NaN.

    Of an expectation of zeros alone, which sparse scales can lead to, everything but zeros is infinitely far.
    """
    distance, size = float((found.double() - expected).norm()), float(expected.norm())
    if size:
        return distance / size
    return math.inf * distance if distance else 0.0
