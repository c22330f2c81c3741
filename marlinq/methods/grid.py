"""Scales and zero points of one group of input channels: by range, or by a search for the least error.

All functions take weights as [..., g, N] (input channels, then output channels, as the neutral tuple has
them) and return scales and zeros of shape [..., N], float32. Scales are rounded to the dtype they will be
stored in before anything is measured with them, so what is chosen is what a checkpoint holds.

Zero points of asymmetric grids stay in 1..2**bits - 1: GPTQ v1 can't hold 0 portably, and it is only of
use to a group without a negative weight, whose step grows from max/15 to max/14.
"""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.scheme import integer_element

# Shares of the full range that the search tries. Below half of it nothing is won; slightly above it, because
# the code -8 reaches absmax only with a scale of absmax/8, while GPTQ's convention counts from absmax/7.5.
_SHRINK = tuple(1.06 - 0.04 * step for step in range(13))

# N is searched in slices of so many weights: few enough for a CPU's cache to hold the temporaries, many
# enough for a GPU to be busy.
_SLICE = {"cpu": 1 << 19}
_LARGE_SLICE = 1 << 24


def minmax_grid(
    weight: Tensor, *, bits: int = 4, symmetric: bool, scale_dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """The grid that spans each output channel's range (GPTQ's convention).

    Symmetric: s = 2 * absmax / (2**bits - 1), z = 2**(bits-1). Asymmetric: the range is widened to include
    0, s = (max - min) / (2**bits - 1), z = round(-min / s).

    Args:
        weight: float32 [..., g, N], finite.
        bits: 4 or 8.
        symmetric: fix the zero point in the middle of the codes.
        scale_dtype: the dtype that the scales will be stored in.

    Returns:
        scales and zeros, float32 [..., N]; the scales are exact in ``scale_dtype``, finite and not zero.
    """
    top = (1 << bits) - 1
    if symmetric:
        scales = storable_scales(weight.abs().amax(dim=-2) * (2 / top), scale_dtype)
        return scales, torch.full_like(scales, integer_element(bits).midpoint)
    high, low = weight.amax(dim=-2).clamp(min=0), weight.amin(dim=-2).clamp(max=0)
    return _asymmetric_grid(low, high, top, scale_dtype)


def search_grid(
    weight: Tensor,
    importance: Tensor,
    *,
    bits: int = 4,
    symmetric: bool,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor]:
    """The grid with the least importance-weighted rounding error, sum_k importance[k] * (w[k] - q[k])**2.

    Each output channel of the group tries a list of shrunken ranges, a symmetric one both signs of the
    scale: with a negative scale the code -8 lies on the positive side.

    Args:
        weight: float32 [g, N], finite.
        importance: float32 [g], not negative: what a squared error of each channel costs.
        bits, symmetric, scale_dtype: as in :func:`minmax_grid`.

    Returns:
        scales and zeros, float32 [N], as in :func:`minmax_grid`.
    """
    g, n = weight.shape
    width = max(1, _SLICE.get(weight.device.type, _LARGE_SLICE) // g)
    parts = [
        _search(weight[:, start : start + width], importance, bits, symmetric, scale_dtype)
        for start in range(0, n, width)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def storable_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``scales`` rounded to ``dtype`` and kept finite and away from zero, as float32.

    A channel of zeros has scale 0, which can't be divided by: it gets 1, since any scale stores it. Other
    magnitudes are kept within the normal numbers of ``dtype``, where kernels don't flush them to zero.
    """
    info = torch.finfo(dtype)
    magnitude = scales.abs().clamp(min=info.tiny, max=info.max).to(dtype).to(torch.float32)
    return torch.where(scales == 0, torch.ones_like(scales), magnitude.copysign(scales))


def _asymmetric_grid(low: Tensor, high: Tensor, top: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = storable_scales((high - low) / top, dtype)
    zeros = torch.round(-low / scales)
    # Where the zero point is held at 1, the codes above it have one step less to reach the maximum.
    scales = torch.where(zeros < 1, storable_scales(high / (top - 1), dtype), scales)
    return scales, zeros.clamp(1, top)


def _search(
    weight: Tensor, importance: Tensor, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    top = (1 << bits) - 1
    best_cost = torch.full_like(weight[0], torch.inf)
    # What stands if every cost overflows to infinity.
    best_scales, best_zeros = minmax_grid(weight, bits=bits, symmetric=symmetric, scale_dtype=dtype)
    if symmetric:
        absmax = weight.abs().amax(dim=0) * (2 / top)
    else:
        high, low = weight.amax(dim=0).clamp(min=0), weight.amin(dim=0).clamp(max=0)
    codes, errors = torch.empty_like(weight), torch.empty_like(weight)
    for shrink in _SHRINK:
        for sign in (1, -1) if symmetric else (1,):
            if symmetric:
                scales = storable_scales(absmax * (shrink * sign), dtype)
                zeros = torch.full_like(scales, integer_element(bits).midpoint)
            else:
                scales, zeros = _asymmetric_grid(low * shrink, high * shrink, top, dtype)
            torch.mul(weight, scales.reciprocal(), out=errors).add_(zeros)
            torch.round(errors, out=codes).clamp_(0, top)
            cost = (importance @ errors.sub_(codes).square_()).mul_(scales.square())
            better = cost < best_cost
            best_cost = torch.where(better, cost, best_cost)
            best_scales = torch.where(better, scales, best_scales)
            best_zeros = torch.where(better, zeros, best_zeros)
    return best_scales, best_zeros
