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
    single = [one for one in (grid.tensor_scale, grid.input_scale) if one is not None]
    # One transfer from a GPU. A NaN is both the least and the largest.
    found = torch.stack((*(one.float() for one in single), *grid.scales.float().abs().aminmax())).tolist()
    names = ("second-level", "activations'") if grid.tensor_scale is not None else ("activations'",)
    for what, number in zip(names, found[:-2], strict=False):
        if not (math.isfinite(number) and number > 0):
            seen = (
                "; an expert that no calibration text reached may have got it"
                if what != "second-level"
                else ""
            )
            return f"the {what} scale is {number}, expected above 0{seen}"
    second = 1.0 if grid.tensor_scale is None else found[0]
    factor = _weights_of_scale(grid.element, second, divides=grid.tensor_scale_divides)
    low, high = found[-2:]
    if low == 0 and grid.tensor_scale is not None and underflowed(grid.with_codes(codes())):
        low = math.ulp(0)  # below every bound, so that the typical scale decides
    return _sizes_fault(grid.scales, low, high, factor, lambda: grid.with_codes(codes()))


def stored_scales_fault(
    element: Element, scales: Tensor, weight: Callable[[], QuantizedWeight]
) -> str | None:
    """As :func:`scales_fault`, of scales that multiply, in whatever order they are stored.

    ``weight`` returns the decoded weight; it is called only where the scales alone don't decide.
    """
    low, high = torch.stack(scales.float().abs().aminmax()).tolist()
    return _sizes_fault(scales, low, high, _weights_of_scale(element, 1.0, divides=False), weight)


def _sizes_fault(
    scales: Tensor, low: float, high: float, factor: float, weight: Callable[[], QuantizedWeight]
) -> str | None:
    """The rules of magnitudes of scales, ``low`` to ``high``; the largest weight is ``factor`` times its
    scale."""
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~torch.isfinite(scales.float())).sum())
        return f"{bad} of {scales.numel()} scales are NaN or infinite"
    if low == 0:
        return f"{int((scales.float() == 0).sum())} of {scales.numel()} scales are zero"
    if high * factor > IMPOSSIBLE and (typical := _median(scales) * factor) > IMPOSSIBLE:
        return (
            f"half of the scales reach weights of {typical:.3g}; are they reciprocals, or another module's?"
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


def underflowed(q: QuantizedWeight) -> int:
    """How many scales a writer rounded to zero and then divided by, or 0 if a zero scale has another cause.

    Old versions of ModelOpt do so to blocks whose weights are below 2**-18 of the largest: weights divided by
    zero get the code of the largest magnitude. A scale that was lost has codes of all magnitudes.
    """
    zero = q.scales.float() == 0
    by_output = zero.repeat_interleave(q.granularity.outputs_per_group(q.out_features), dim=1)
    under = by_output[q.g_idx.long(), : q.out_features]
    sizes = q.element.decode(q.codes[under]).abs()
    largest = max(map(abs, q.element.ends))
    return int(zero.sum()) if bool(((sizes == 0) | (sizes == largest)).all()) else 0


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
    return _median(grid.scales) * _weights_of_scale(grid.element, second, divides=grid.tensor_scale_divides)


def _median(scales: Tensor) -> float:
    return float(scales.float().abs().median())


def _weights_of_scale(element: Element, second: float, *, divides: bool) -> float:
    """Magnitude of the largest weight under a scale of 1, where the second-level scale is ``second``."""
    furthest = max(abs(end - element.midpoint) for end in element.ends)
    return furthest / second if divides else furthest * second


def _used_scales(q: QuantizedWeight) -> Tensor:
    """bool [G, P], whether a weight under the scale is not zero."""
    used = torch.zeros(q.groups, q.out_features, dtype=torch.int32, device=q.codes.device)
    used.index_add_(0, q.g_idx.long(), q.used().to(torch.int32))
    columns = torch.arange(q.out_features, device=used.device)
    columns //= q.granularity.outputs_per_group(q.out_features)
    by_scale = torch.zeros(q.scales.shape, dtype=torch.int32, device=used.device)
    return by_scale.index_add_(1, columns, used) > 0
