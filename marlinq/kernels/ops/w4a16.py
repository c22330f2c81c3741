"""``torch.ops.marlinq.w4a16_gemm``: 16-bit activations times a 4-bit weight in the Marlin layout."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.ops.direct import nobody_watches
from marlinq.kernels.ops.gemm import GemmOperator

OPERATOR = GemmOperator(INT4)
_OVERLOAD = OPERATOR.overload
_planned = OPERATOR.planned
# A compiler that traces this reads True, and takes the operator.
_traced = torch.compiler.is_dynamo_compiling


def w4a16_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out_features: int,
    order: Tensor | None = None,
) -> Tensor:
    """``x @ W + bias`` with a 4-bit weight in the Marlin layout.

    Args:
        x: [..., K] float16 or bfloat16, on the CPU also float32; with ``order`` any number of columns.
        words: int32 [K/16, 2N], K and N multiples of 64 (:func:`marlinq.formats.layouts.marlin.pack_tiles`).
        scales: [G, N] in ``x.dtype``, stored order (:func:`marlinq.formats.layouts.marlin.permute_scales`).
        zeros: None for symmetric weights, else zero points [G, N] in ``x.dtype``, stored order: integers
            from 0 to 127, which a GPU does not check.
        bias: None or [out_features] in ``x.dtype``, channel order.
        group_size: 32, 64, 128 or -1 (one group).
        out_features: columns to return, at most N; the rest is padding.
        order: None or int32 [K], contiguous: channel j of the weight multiplies column ``order[j]`` of ``x``
            (activation order); nothing where it is negative. Other entries have to be columns of ``x``,
            which a GPU does not check.

    Returns:
        [..., out_features] in ``x.dtype``, accumulated in float32.

    Raises:
        ValueError: an operand's shape or dtype does not fit.
        UnsupportedError: a shape or dtype the kernel can't run.
        EnvironmentProblem: CuPy, NVRTC or the driver is missing.
    """
    # A subclass may hold its values elsewhere.
    if not _traced() and type(x) is Tensor and nobody_watches():
        found = _planned(x, words, scales, zeros, bias, group_size, out_features, order)
        if found is not None:
            return found
    return _OVERLOAD(  # type: ignore[no-any-return]
        x, words, scales, zeros, bias, group_size, out_features, order
    )
