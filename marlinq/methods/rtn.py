"""Round-to-nearest: the baseline that needs no calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.settings import Flag, setting
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.grid import minmax_grid, search_grid
from marlinq.methods.method import (
    Method,
    MethodOptions,
    SolveReport,
    Statistics,
    check_weight,
    whole_groups,
)
from marlinq.methods.pruning import smallest_removed
from marlinq.methods.quantity import ErrorQuantity
from marlinq.methods.second_level import first_level, second_level

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


@dataclass(frozen=True)
class RTNOptions(MethodOptions):
    """Options of round-to-nearest.

    Attributes:
        clip_search: choose scales by the least squared error of the group's weights, instead of by its
            largest weight.
    """

    clip_search: bool = setting(
        False, Flag(), "Search each group's scale for the least error, instead of spanning its range."
    )


class RTN(Method[RTNOptions, Statistics]):
    """Rounds every weight to the nearest value of its group's grid."""

    name = "rtn"
    options = RTNOptions
    calibrated = False
    per_output = False
    prunes = True

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        if scheme.activations is not None and not scheme.activations.dynamic:
            return f"{scheme.activations.describe()}: {self.name} sees no activations; use rtn-static"
        return super().scheme_refusal(scheme)

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
    """Quantise every weight to the nearest point of its tile's grid; of a sparse scheme, prune by magnitude.

    Args:
        weight: float [N, K].
        scheme: element, granularity, zero points and scales; ragged blocks are fine, ragged groups are not.
        clip_search: choose scales by the squared error, instead of spanning the range.
        name: name of the weight in error messages.

    Returns:
        The quantised weight, on the device of ``weight``; its g_idx is trivial.

    Raises:
        UnsupportedError: K is not a multiple of the group size, or of the span of a sparse scheme.
        NumericsError: ``weight`` holds NaN, infinity or values beyond the range of the scales' dtype.
    """
    check_weight(weight, scheme, name)
    if scheme.granularity.kind == "group":
        whole_groups(scheme, weight.shape[1], name)
    wide = smallest_removed(weight.to(torch.float32), scheme.sparsity)
    tensor_scale = second_level(wide, scheme)
    tiles = _to_tiles(first_level(wide, tensor_scale, scheme), scheme.granularity)
    if clip_search:
        ones = torch.ones(tiles.shape[1], device=tiles.device)
        grids = [search_grid(tile, ones, scheme) for tile in tiles]
        scales, zeros = (torch.stack(part) for part in zip(*grids, strict=True))
    else:
        scales, zeros = minmax_grid(tiles, scheme)
    codes = scheme.element.nearest(tiles / scales.unsqueeze(1) + zeros.unsqueeze(1))
    return QuantizedWeight.from_codes(
        scheme,
        _from_tiles(codes, scheme.granularity, weight.shape),
        scales=scales.to(torch_dtype(scheme.scale_dtype)),
        zeros=zeros.to(torch.uint8),
        tensor_scale=tensor_scale,
    )


def _to_tiles(weight: Tensor, granularity: Granularity) -> Tensor:
    """[N, K] to [G, T, P]: the T weights that share the scale (g, p); zeros fill up the last tiles."""
    n, k = weight.shape
    c, r = granularity.channels_per_group(k), granularity.outputs_per_group(n)
    groups, columns = granularity.scales_shape(k, n)
    padded = torch.nn.functional.pad(weight, (0, groups * c - k, 0, columns * r - n))
    return padded.t().reshape(groups, c, columns, r).transpose(2, 3).reshape(groups, c * r, columns)


def _from_tiles(tiles: Tensor, granularity: Granularity, shape: torch.Size) -> Tensor:
    """[G, T, P] to [K, N] for a weight of ``shape`` [N, K]; undoes :func:`_to_tiles`, transposed."""
    n, k = shape
    c, r = granularity.channels_per_group(k), granularity.outputs_per_group(n)
    groups, columns = granularity.scales_shape(k, n)
    padded = tiles.reshape(groups, c, r, columns).transpose(2, 3).reshape(groups * c, columns * r)
    return padded[:k, :n].contiguous()
