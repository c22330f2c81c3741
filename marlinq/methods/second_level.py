"""The second-level scale of a weight: a float32 number that its 8-bit scales are multiplied or divided by.

It lets the scales of groups reach all of their dtype's range. Where they lie between its powers of two
decides how they are rounded, so a search tries an octave, with the scales of groups searched in each trial.
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
"""Of an octave."""
_ROWS = 32
"""Output channels, evenly spread, that a search looks at."""


def second_level(weight: Tensor, scheme: Scheme) -> Tensor | None:
    """The scale, float32 [], with which the scales of groups reach their dtype's largest value; None where
    ``scheme`` has none.

    Args:
        weight: float [N, K].
        scheme: scheme that it gets.
    """
    if scheme.tensor_scale == "none":
        return None
    largest = weight.abs().amax().to(torch.float32)
    reach = torch.finfo(torch_dtype(scheme.scale_dtype)).max * scheme.element.ends[1]
    return _stored(torch.where(largest == 0, torch.ones_like(largest), largest / reach), scheme)


def searched_second_level(weight: Tensor, power: Tensor, g: int, scheme: Scheme) -> Tensor | None:
    """As :func:`second_level`, of the trials in one octave above it that with the least error.

    Args:
        weight: float [N, K].
        power: float32 [K], costs of a squared error of each channel.
        g: channels of a group.
        scheme: scheme that the weight gets.
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
        # In units of the first level, which are as large as the factor.
        loss = round_groups(w, power.reshape(k // g, g), scheme)[3] * factor**2
        if loss < cost:
            best, cost = tried, loss
    return best


def first_level(weight: Tensor, second: Tensor | None, scheme: Scheme) -> Tensor:
    """What the codes and scales of groups stand for, of ``weight`` with the second-level scale ``second``."""
    if second is None:
        return weight
    return weight * second if scheme.tensor_scale == "divides" else weight / second


def _stored(multiplier: Tensor, scheme: Scheme) -> Tensor:
    return multiplier.reciprocal() if scheme.tensor_scale == "divides" else multiplier
