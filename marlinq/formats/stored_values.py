"""The rules that stored scales, orders and codes keep, one place for whoever reads them.

Reading a checkpoint refuses what breaks one; ``verify`` reports it in its rows. No quantiser writes such
values, whatever the weights are; statistics that tell only how likely a value is stay with ``verify``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from marlinq.core.scheme import Element
from marlinq.core.weight import Grid, QuantizedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

IMPOSSIBLE = 2.0**16
"""Typical magnitude of the largest weight under a scale that no model has: float16 ends below it. Scales used
the wrong way round multiply by 10**6 and more."""
VANISHING = 2.0**-56
"""Typical magnitude of the largest weight under a scale below which a module gives nothing but zeros: 2**16
products with activations of float16's largest, 2**16, stay below float16's least number, 2**-24. Exponents
from which the bias of 127 is taken twice give weights near 2**-127."""


def scales_fault(grid: Grid, codes: Callable[[], Tensor]) -> str | None:
    """What is wrong with the scales of a module, for a sentence that begins with its name; or None.

    Args:
        grid: its scales, of weights and of activations.
        codes: function that returns its codes, uint8 [K, N]; called only where the scales alone don't decide.
    """
    named = {"second-level": grid.tensor_scale, "activations'": grid.input_scale}
    single = {name: scale for name, scale in named.items() if scale is not None}
    # One transfer from a GPU. A NaN is both the least and the largest.
    extremes = grid.scales.float().abs().aminmax()
    *numbers, low, high = torch.stack((*(one.float() for one in single.values()), *extremes)).tolist()
    for name, number in zip(single, numbers, strict=True):
        if not (math.isfinite(number) and number > 0):
            cause = "" if name == "second-level" else "; did no calibration text reach this expert?"
            return f"the {name} scale is {number}, expected above 0{cause}"
    second = 1.0 if grid.tensor_scale is None else numbers[0]
    factor = largest_weight(grid.element, second, divides=grid.tensor_scale_divides)
    if low == 0 and grid.tensor_scale is not None and _zeros_were_rounded(grid.with_codes(codes())):
        low = math.ulp(0)  # below every bound, so that the typical scale decides
    return _magnitudes_fault(grid.scales, low, high, factor, lambda: grid.with_codes(codes()))


def stored_scales_fault(
    element: Element, scales: Tensor, weight: Callable[[], QuantizedWeight]
) -> str | None:
    """As :func:`scales_fault`, for scales of one level before they are decoded.

    Args:
        element: element of the codes.
        scales: the stored scales, in any order.
        weight: function that returns the decoded weight; called only where the scales alone don't decide.
    """
    low, high = torch.stack(scales.float().abs().aminmax()).tolist()
    return _magnitudes_fault(scales, low, high, largest_weight(element), weight)


def _magnitudes_fault(
    scales: Tensor, low: float, high: float, factor: float, weight: Callable[[], QuantizedWeight]
) -> str | None:
    """What is wrong with the magnitudes of ``scales``, or None.

    Args:
        scales: in any order.
        low: smallest magnitude; above 0 where zeros are allowed.
        high: largest magnitude.
        factor: magnitude of the largest weight under a scale of 1.
        weight: as for :func:`stored_scales_fault`.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~torch.isfinite(scales.float())).sum())
        return f"{bad} of {scales.numel()} scales are NaN or infinite"
    if low == 0:
        return f"{int((scales.float() == 0).sum())} of {scales.numel()} scales are zero"
    if high * factor > IMPOSSIBLE and (typical := _median(scales) * factor) > IMPOSSIBLE:
        if scales.dtype == torch.float8_e8m0fnu:
            # Rounded up to a power of two, so codes may end at half of the element's range.
            typical = float(_largest_weights(weight()).median())
        if typical > IMPOSSIBLE:
            return (
                f"half of the scales reach weights of {typical:.3g}; are they reciprocals, or another "
                "module's?"
            )
    if low * factor < VANISHING and _median(scales) * factor < VANISHING:
        # The scale of zeros may be anything, so those of other weights decide.
        whole = weight()
        used = whole.scales[_used_scales(whole)]
        typical = _median(used) * factor if used.numel() else VANISHING
        if typical < VANISHING:
            return (
                f"half of the scales reach weights of {typical:.3g}, which add nothing to any output; was "
                "the bias of their exponents taken away twice, or are they another module's?"
            )
    return None


def _zeros_were_rounded(q: QuantizedWeight) -> bool:
    """Whether a writer rounded all scales that are zero to it, and then divided weights by them.

    Old versions of ModelOpt do so to blocks whose weights are below 2**-18 of the largest: weights divided by
    zero get the code of the largest magnitude. A scale that was lost has codes of all magnitudes.
    """
    zero = q.scales.float() == 0
    by_output = zero.repeat_interleave(q.granularity.outputs_per_group(q.out_features), dim=1)
    under = by_output[q.g_idx.long(), : q.out_features]
    magnitudes = q.element.decode(q.codes[under]).abs()
    largest = max(map(abs, q.element.ends))
    return bool(((magnitudes == 0) | (magnitudes == largest)).all())


def codes_fault(q: QuantizedWeight) -> str | None:
    """What is wrong with the codes of a module, for a sentence that begins with its name; or None."""
    nans = sum(int((q.codes == code).sum()) for code in nan_codes(q.element))
    return f"{nans} of {q.codes.numel()} codes stand for NaN" if nans else None


def order_fault(grid: Grid) -> str | None:
    """What is wrong with the g_idx of a module, for a sentence that begins with its name; or None."""
    if grid.has_trivial_g_idx:
        return None
    counts = torch.bincount(grid.g_idx.long(), minlength=grid.groups)
    expected = torch.full_like(counts, grid.channels_per_group)
    expected[-1] = grid.in_features - grid.channels_per_group * (grid.groups - 1)
    if torch.equal(counts, expected):
        return None
    group = int((counts != expected).nonzero()[0])
    return f"group {group} of g_idx has {int(counts[group])} channels, expected {int(expected[group])}"


def nan_codes(element: Element) -> list[int]:
    """The codes of an element that stand for NaN."""
    return [code for code, value in enumerate(element.table or ()) if math.isnan(value)]


def typical_weight(grid: Grid) -> float:
    """Magnitude of the largest weight under the median scale."""
    second = 1.0 if grid.tensor_scale is None else float(grid.tensor_scale)
    return _median(grid.scales) * largest_weight(grid.element, second, divides=grid.tensor_scale_divides)


def largest_weight(element: Element, second: float = 1.0, *, divides: bool = False) -> float:
    """Magnitude of the largest weight under a scale of 1.

    Args:
        element: element of the codes.
        second: the second-level scale.
        divides: whether weights are divided by ``second`` instead of multiplied.
    """
    furthest = max(abs(end - element.midpoint) for end in element.ends)
    return furthest / second if divides else furthest * second


def _median(scales: Tensor) -> float:
    return float(scales.float().abs().median())


def _used_scales(q: QuantizedWeight) -> Tensor:
    """bool [G, P], whether a weight under the scale is not zero."""
    used = torch.zeros(q.groups, q.out_features, dtype=torch.int32, device=q.codes.device)
    used.index_add_(0, q.g_idx.long(), q.used().to(torch.int32))
    columns = _columns(q)
    by_scale = torch.zeros(q.scales.shape, dtype=torch.int32, device=used.device)
    return by_scale.index_add_(1, columns, used) > 0


def _largest_weights(q: QuantizedWeight) -> Tensor:
    """float32 [G, P], magnitude of the largest weight under each scale of a weight without a second level."""
    values = q.element.decode(q.codes).abs()
    shape = (q.groups, q.out_features)
    rows = q.g_idx.long()[:, None].expand_as(values)
    by_output = values.new_zeros(shape).scatter_reduce_(0, rows, values, "amax")
    columns = _columns(q).expand(shape)
    by_scale = values.new_zeros(q.scales.shape).scatter_reduce_(1, columns, by_output, "amax")
    return by_scale * q.scales.float().abs()


def _columns(q: QuantizedWeight) -> Tensor:
    """int64 [N], the column of scales of each output channel."""
    columns = torch.arange(q.out_features, device=q.codes.device)
    return columns // q.granularity.outputs_per_group(q.out_features)


def has_coarse_scales(q: Grid) -> bool:
    """Whether most scales are the smallest of float16 that quantisers write, its smallest normal number,
    instead of the smaller ones that the weights need."""
    if q.scheme.scale_dtype != "float16":
        return False
    return bool((q.scales.abs() <= torch.finfo(torch.float16).tiny).float().mean() > 0.5)
