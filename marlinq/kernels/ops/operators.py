"""The GEMM of every weight format that has kernels, by its name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8
from marlinq.kernels.ops.direct import nobody_watches
from marlinq.kernels.ops.gemm import GemmOperator
from marlinq.kernels.ops.w4a16 import w4a16_gemm

# A compiler that traces this reads True, and takes the operator.
_traced = torch.compiler.is_dynamo_compiling


def _gemm(operator: GemmOperator) -> Callable[..., Tensor]:
    """The operator as a function, past torch's dispatcher where nobody watches."""
    overload, find_planned = operator.overload, operator.planned

    def gemm(
        x: Tensor,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        out_features: int,
        order: Tensor | None = None,
    ) -> Tensor:
        # A subclass may hold its values elsewhere.
        if not _traced() and type(x) is Tensor and nobody_watches():
            planned = find_planned(x, words, scales, zeros, bias, group_size, out_features, order)
            if planned is not None:
                return planned
        return overload(x, words, scales, zeros, bias, group_size, out_features, order)  # type: ignore[no-any-return]

    return gemm


GEMMS: dict[str, Callable[..., Tensor]] = {
    INT4.name: w4a16_gemm,
    **{each.name: _gemm(GemmOperator(each)) for each in (INT8, E4M3, E2M1)},
}
"""``GEMMS[format.name](x, words, scales, zeros, bias, group_size, out_features, order)``; arguments as
:func:`marlinq.kernels.w4a16_gemm`, with the format's words and its stored scales."""
