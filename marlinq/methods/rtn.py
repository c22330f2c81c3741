"""Round-to-nearest: the baseline that needs no calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.core.scheme import integer_element
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.methods.grid import minmax_grid


def round_to_nearest(
    weight: Tensor,
    *,
    group_size: int,
    symmetric: bool,
    bits: int = 4,
    scale_dtype: torch.dtype = torch.float16,
    name: str = "weight",
) -> QuantizedWeight:
    """Quantise every weight to the nearest point of its group's min-max grid.

    Args:
        weight: float [N, K].
        group_size: input channels a group, a divisor of K, or -1 for one group.
        symmetric: fix the zero point in the middle of the codes.
        bits: 4 or 8.
        scale_dtype: the dtype that the scales are stored in.
        name: what error messages call the weight.

    Returns:
        The quantised tensor, on the device of ``weight``.

    Raises:
        UnsupportedError: K is not a multiple of ``group_size``.
        NumericsError: ``weight`` holds NaN, infinity or values beyond the range of ``scale_dtype``.
    """
    check_weight(weight, scale_dtype, name)
    n, k = weight.shape
    g = channels_per_group(k, group_size, name)
    w = weight.t().to(torch.float32).reshape(k // g, g, n)
    scales, zeros = minmax_grid(w, bits=bits, symmetric=symmetric, scale_dtype=scale_dtype)
    codes = torch.round(w / scales.unsqueeze(1) + zeros.unsqueeze(1)).clamp_(0, (1 << bits) - 1)
    return QuantizedWeight(
        codes=codes.reshape(k, n).to(torch.uint8),
        scales=scales.to(scale_dtype),
        zeros=zeros.to(torch.uint8),
        g_idx=trivial_g_idx(k, g).to(weight.device),
        group_size=g,
        element=integer_element(bits),
    )


def channels_per_group(in_features: int, group_size: int, name: str) -> int:
    """``group_size`` with -1 resolved to K.

    Raises:
        UnsupportedError: K is not a multiple of it, so the last group would be short.
    """
    if group_size == -1:
        return in_features
    if group_size < 1 or in_features % group_size:
        raise UnsupportedError(
            f"{name}: in_features {in_features} is not a multiple of group size {group_size}; "
            "choose another group size for it, or skip it"
        )
    return group_size


def check_weight(weight: Tensor, scale_dtype: torch.dtype, name: str) -> None:
    """Refuse a weight that no grid can hold.

    Raises:
        UnsupportedError: it is not a matrix.
        NumericsError: it holds NaN, infinity, or values whose scale overflows ``scale_dtype``.
    """
    if weight.dim() != 2:
        raise UnsupportedError(f"{name}: expected a weight [N, K], found shape {list(weight.shape)}")
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise NumericsError(
            f"{name}: {bad} of {weight.numel()} weights are NaN or infinite; check the source checkpoint"
        )
    largest = float(weight.abs().max())
    if largest > torch.finfo(scale_dtype).max:
        raise NumericsError(
            f"{name}: a weight of magnitude {largest:.3g} is beyond what {scale_dtype} scales are meant for; "
            "check the source checkpoint"
        )
