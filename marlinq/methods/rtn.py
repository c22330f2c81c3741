"""Round-to-nearest: the baseline that needs no calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.scheme import Scheme
from marlinq.core.settings import Flag, setting
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.base import (
    Method,
    MethodOptions,
    SolveReport,
    Statistics,
    check_weight,
    whole_groups,
)
from marlinq.methods.grid import minmax_grid, search_grid
from marlinq.methods.quantity import ErrorQuantity

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


@dataclass(frozen=True)
class RTNOptions(MethodOptions):
    """How round-to-nearest chooses scales.

    Attributes:
        clip_search: by the least squared error of the group's weights, instead of by its largest weight.
    """

    clip_search: bool = setting(
        False, Flag(), "Search each group's scale for the least error, instead of spanning its range."
    )


class RTN(Method[RTNOptions, Statistics]):
    """Every weight goes to the nearest value of its group's grid."""

    name = "rtn"
    options = RTNOptions
    calibrated = False

    def solve(
        self,
        weights: Sequence[Tensor],
        statistics: Statistics | None,
        scheme: Scheme,
        options: RTNOptions,
        *,
        names: Sequence[str],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        results = []
        for weight, name in zip(weights, names, strict=True):
            quantized = round_to_nearest(weight, scheme, clip_search=options.clip_search, name=name)
            wide = weight.to(torch.float32)
            loss = float((wide - quantized.dequantize()).double().square().sum())
            norm = float(wide.double().square().sum())
            error = loss / norm if norm > 0 else 0.0
            results.append((quantized, SolveReport(error, ErrorQuantity.WEIGHTS, norm=norm)))
        return results


def round_to_nearest(
    weight: Tensor, scheme: Scheme, *, clip_search: bool = False, name: str = "weight"
) -> QuantizedWeight:
    """Quantise every weight to the nearest point of its group's grid.

    Args:
        weight: float [N, K].
        scheme: element, group size, zero points and dtype of the scales.
        clip_search: choose scales by the squared error, instead of spanning the range.
        name: what error messages call the weight.

    Returns:
        The quantised weight, on the device of ``weight``; its g_idx is trivial.

    Raises:
        UnsupportedError: K is not a multiple of the group size.
        NumericsError: ``weight`` holds NaN, infinity or values beyond the range of the scales' dtype.
    """
    check_weight(weight, scheme, name)
    n, k = weight.shape
    g = whole_groups(scheme, k, name)
    w = weight.t().to(torch.float32).reshape(k // g, g, n)
    if clip_search:
        ones = torch.ones(g, device=w.device)
        grids = [search_grid(group, ones, scheme) for group in w]
        scales, zeros = (torch.stack(part) for part in zip(*grids, strict=True))
    else:
        scales, zeros = minmax_grid(w, scheme)
    codes = scheme.element.nearest(w / scales.unsqueeze(1) + zeros.unsqueeze(1))
    return QuantizedWeight.from_codes(
        scheme,
        codes.reshape(k, n),
        scales=scales.to(torch_dtype(scheme.scale_dtype)),
        zeros=zeros.to(torch.uint8),
    )
