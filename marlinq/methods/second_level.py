"""The second-level scale of a weight: a float32 number by which its 8-bit scales are multiplied or divided.

It lets the scales of groups use all of their dtype's range. The rounding of these 8-bit scales depends on the
second-level scale, so a search tries several values within a factor of two, and searches the scales of groups
for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.scheme import Scheme
from marlinq.methods.imatrix import round_groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_TRIALS = 4
"""Values of the second-level scale that a search tries, within a factor of two."""
_ROWS = 32
"""Output channels, evenly spread, on which a search measures errors."""


def second_level(weight: Tensor, scheme: Scheme) -> Tensor | None:
    """The second-level scale, float32 [], with which the largest scale of a group is its dtype's largest
    value.

    None where ``scheme`` has no second level.

    Args:
        weight: float [N, K].
        scheme: scheme of the quantised weight.
    """
    if scheme.tensor_scale == "none":
        return None
    largest = weight.abs().amax().to(torch.float32)
    reach = torch.finfo(torch_dtype(scheme.scale_dtype)).max * scheme.element.ends[1]
    return _stored(torch.where(largest == 0, torch.ones_like(largest), largest / reach), scheme)


def searched_second_level(weight: Tensor, power: Tensor, g: int, scheme: Scheme) -> Tensor | None:
    """The second-level scale with the least error, of several values within a factor of two of
    :func:`second_level`.

    Args:
        weight: float [N, K].
        power: float32 [K], weight of the squared error of each channel.
        g: channels of a group.
        scheme: scheme of the quantised weight.
    """
    least = second_level(weight, scheme)
    if least is None:
        return None
    n, k = weight.shape
    rows = weight[:: max(1, n // _ROWS)][:_ROWS].to(torch.float32)
    best, cost = least, torch.inf
    for trial in range(_TRIALS):
        factor = 2.0 ** (trial / _TRIALS)
        tried = least / factor if scheme.tensor_scale == "divides" else least * factor
        w = first_level(rows, tried, scheme).t().contiguous().reshape(k // g, g, len(rows))
        # The loss is in units of the first level, which are proportional to the factor.
        loss = round_groups(w, power.reshape(k // g, g), scheme)[3] * factor**2
        if loss < cost:
            best, cost = tried, loss
    return best


def first_level(weight: Tensor, second: Tensor | None, scheme: Scheme) -> Tensor:
    """``weight`` without its second-level scale ``second``: the values that codes and scales of groups
    represent."""
    if second is None:
        return weight
    return weight * second if scheme.tensor_scale == "divides" else weight / second


def _stored(multiplier: Tensor, scheme: Scheme) -> Tensor:
    return multiplier.reciprocal() if scheme.tensor_scale == "divides" else multiplier
