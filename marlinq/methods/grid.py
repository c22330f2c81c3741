"""Scales and zero points of one group of input channels: by range, or by a search for the least error.

All functions take weights as [..., g, N] (input channels, then output channels) and return scales and zeros
of shape [..., N], float32. Scales are rounded to the dtype that they will be stored in before errors are
measured.

Zero points of asymmetric grids stay in 1..2**bits - 1, since GPTQ v1 can't hold 0 portably. Only groups
without a negative weight lose by that: their step grows from max/15 to max/14.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marlinq.core.dtypes import FLOATS, torch_dtype
from marlinq.core.float_elements import E2M1
from marlinq.core.scheme import Element, Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

# Shares of the full range that the search tries, 1.06 down to 0.70. Smaller shares would clip weights that
# other texts need (docs/lab-notes/quality.md). 1.06 because the full range of GPTQ's convention has the scale
# absmax/7.5, but code 7 reaches absmax only with a scale of absmax/7.
_SHRINK = tuple(1.06 - 0.03 * step for step in range(13))

# For E2M1: up to 1.5, with which the largest weight becomes 4, not 6: values below 4 lie closer together.
_VALUES_SHRINK = tuple(1.56 - 0.08 * step for step in range(11))
# For scales that are powers of two: the least that spans the range, and half of it, which clips.
_POWERS = (1.0, 0.5)

# Two signs of a scale whose costs differ by less than this share are equally good: far more than the rounding
# of float32 sums, far less than matters.
_TIE = 1e-4

# Weights of a slice of N, which is searched at once: few enough for a CPU's caches, many enough to fill a
# GPU.
_SLICE = {"cpu": 1 << 19}
_LARGE_SLICE = 1 << 24

# Weights times candidates that the search rounds at once: 256 KiB, which stays in a core's cache. A small
# layer's time is that of the calls, not of their arithmetic.
_TOGETHER = 1 << 16


def minmax_grid(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The grid that spans each output channel's range.

    Integers follow GPTQ's convention. Symmetric: s = 2 * absmax / (2**bits - 1), z = 2**(bits-1).
    Asymmetric: the range is widened to include 0, s = (max - min) / (2**bits - 1), z = round(-min / s).
    An element with a table has no zero point, and the least s that keeps the range inside the table's.

    Args:
        weight: float32 [..., g, N], finite; g weights of each column share a scale.
        scheme: its element, zero points and dtype of the scales; the group is what ``weight`` holds.

    Returns:
        scales and zeros, float32 [..., N]; the scales are exact in the scheme's dtype, finite and not zero.
    """
    dtype = torch_dtype(scheme.scale_dtype)
    if scheme.stores_zeros:
        high, low = weight.amax(dim=-2).clamp(min=0), weight.amin(dim=-2).clamp(max=0)
        return _asymmetric_grid(low, high, scheme.element.codes - 1, dtype)
    scales = storable_scales(_full_scales(weight, scheme.element), dtype)
    return scales, torch.full_like(scales, scheme.element.midpoint)


def search_grid(weight: Tensor, importance: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The grid with the least importance-weighted rounding error, sum_k importance[k] * (w[k] - q[k])**2.

    Each output channel tries a list of shrunken ranges; a symmetric grid also both signs of the scale, since
    a negative scale puts the code -8 on the positive side. Where both signs cost the same, code -8 goes to
    the side of the largest weight.

    Args:
        weight: float32 [g, N], finite.
        importance: float32 [g] or [g, N], not negative: weight of the squared error of each channel, or of
            each weight.
        scheme: as in :func:`minmax_grid`.

    Returns:
        scales and zeros, float32 [N], as in :func:`minmax_grid`.
    """
    g, n = weight.shape
    width = max(1, _SLICE.get(weight.device.type, _LARGE_SLICE) // g)
    parts = []
    for start in range(0, n, width):
        part = slice(start, start + width)
        own = importance if importance.dim() == 1 else importance[:, part]
        parts.append(_search(weight[:, part], own, scheme))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def search_factors() -> tuple[float, ...]:
    """Factors of the full scale, or range, of a group of integers that the search tries, in order."""
    return _SHRINK


def nearest_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`storable_scales`, but rounds to the nearest value also where ``dtype`` has only powers of
    two."""
    if dtype != torch.float8_e8m0fnu:
        return storable_scales(scales, dtype)
    # Scales below 0.75 of the power of two above them are nearer to the power below.
    upper = storable_scales(scales, dtype)
    return torch.where(scales.abs() < 0.75 * upper, (upper / 2).clamp(min=torch.finfo(dtype).tiny), upper)


def storable_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``scales`` rounded to ``dtype``, finite and not zero, as float32.

    A scale of 0, of weights that are all zero, becomes 1. Other magnitudes are clamped to the normal numbers
    of ``dtype``, since kernels may flush subnormal ones to zero. Where ``dtype`` has only powers of two,
    scales are rounded up: the nearest could clip a weight by 30 %.
    """
    info = torch.finfo(dtype)
    if dtype == torch.float8_e8m0fnu:
        mantissa, exponent = torch.frexp(scales.abs().clamp(min=info.tiny, max=info.max))
        powers = torch.exp2((exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-126, 127).float())
        return torch.where(scales == 0, torch.ones_like(scales), powers)
    magnitude = scales.abs().clamp(min=info.tiny, max=info.max).to(dtype).to(torch.float32)
    return torch.where(scales == 0, torch.ones_like(scales), magnitude.copysign(scales))


def _asymmetric_grid(low: Tensor, high: Tensor, top: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = storable_scales((high - low) / top, dtype)
    zeros = torch.round(-low / scales)
    # Where the zero point is raised to 1, only top - 1 steps are left to reach the maximum.
    scales = torch.where(zeros < 1, storable_scales(high / (top - 1), dtype), scales)
    return scales, zeros.clamp(1, top)


def _full_scales(weight: Tensor, element: Element) -> Tensor:
    """The scales of a symmetric grid that spans the range of ``weight`` [..., g, N]."""
    if element.table is None:
        return weight.abs().amax(dim=-2) * (2 / (element.codes - 1))
    high, low = weight.amax(dim=-2).clamp(min=0), weight.amin(dim=-2).clamp(max=0)
    least, largest = element.ends
    needed = [part / end for part, end in ((high, largest), (low, least)) if end]
    return torch.stack(needed).amax(dim=0)


def _search(weight: Tensor, importance: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    element = scheme.element
    scales, zeros = _candidates(weight, scheme)
    costs = scales.square()
    together = max(1, min(_TOGETHER // weight.numel(), len(scales)))
    # Large tensors that are made anew each time would cost more than what is written to them.
    buffers = weight.new_empty((2, together, *weight.shape))
    for start in range(0, len(scales), together):
        part = slice(start, start + together)
        errors, codes = buffers[:, : len(scales[part])]
        torch.mul(weight, scales[part].reciprocal().unsqueeze(1), out=errors).add_(zeros[part].unsqueeze(1))
        if element.table is None:
            torch.round(errors, out=codes).clamp_(0, element.codes - 1)
        else:
            codes = element.rounded(errors)
        for cost, squares in zip(costs[part], errors.sub_(codes).square_(), strict=True):
            cost.mul_(_weighed(importance, squares))
    if _negative_scales(scheme):
        # Where no weight is clipped both signs cost the same, and float rounding must not decide between
        # them.
        plus, minus = costs[0::2], costs[1::2]
        negative = minus < plus * (1 - _TIE)
        costs = torch.where(negative, minus, plus)
        scales = torch.where(negative, scales[1::2], scales[0::2])
        zeros = zeros[0::2]
    costs = torch.where(costs.isnan(), torch.inf, costs)
    best = costs.argmin(dim=0, keepdim=True)  # the first of equal ones
    finite = costs.gather(0, best)[0] < torch.inf
    # The result if every cost overflows to infinity.
    widest_scales, widest_zeros = minmax_grid(weight, scheme)
    best_scales, best_zeros = scales.gather(0, best)[0], zeros.gather(0, best)[0]
    return torch.where(finite, best_scales, widest_scales), torch.where(finite, best_zeros, widest_zeros)


def _candidates(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Scales and zeros, float32 [candidates, N], that the search tries for ``weight`` [g, N], in order.

    Where scales may be negative, every odd candidate is the one before it with the other sign.
    """
    element, dtype = scheme.element, torch_dtype(scheme.scale_dtype)
    signs = (1, -1) if _negative_scales(scheme) else (1,)
    shares = [factor * sign for factor in _factors(scheme) for sign in signs]
    factors = torch.tensor(shares, dtype=torch.float32, device=weight.device).unsqueeze(1)
    if scheme.stores_zeros:
        high, low = weight.amax(dim=0).clamp(min=0), weight.amin(dim=0).clamp(max=0)
        return _asymmetric_grid(low * factors, high * factors, element.codes - 1, dtype)
    full = _full_scales(weight, element)
    if element.table is None and scheme.scale_dtype in FLOATS:
        # The sign tried first puts code 0 (-8), which has no counterpart, on the side of the largest weight.
        full = torch.where(weight.amax(dim=0) > -weight.amin(dim=0), -full, full)
    scales = storable_scales(full * factors, dtype)
    return scales, torch.full_like(scales, element.midpoint)


def _negative_scales(scheme: Scheme) -> bool:
    """Whether the search tries scales of both signs; those of 8 bits can't be negative."""
    return not scheme.stores_zeros and scheme.scale_dtype in FLOATS


def _factors(scheme: Scheme) -> tuple[float, ...]:
    """Factors of the full scale that the search tries."""
    if scheme.scale_dtype == "float8_e8m0fnu":
        return _POWERS
    return _VALUES_SHRINK if scheme.element == E2M1 else _SHRINK


def _weighed(importance: Tensor, squares: Tensor) -> Tensor:
    """The weighted sums [N] of squares [g, N], which are overwritten."""
    return importance @ squares if importance.dim() == 1 else squares.mul_(importance).sum(dim=0)
