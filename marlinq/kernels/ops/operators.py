"""The torch operators that multiply by quantised weights, one for each weight format with kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT4_SPARSE, INT8
from marlinq.kernels.ops.direct import nobody_watches
from marlinq.kernels.ops.gemm import GemmOperator

# True while torch.compile traces, so that compiled code calls the operator itself.
_traced = torch.compiler.is_dynamo_compiling


def _gemm(operator: GemmOperator) -> Callable[..., Tensor]:
    """A function that calls the operator, and bypasses torch's dispatcher where nothing intercepts it."""
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
        """``x @ W + bias`` with a packed weight.

        Args:
            x: [..., K] float16 or bfloat16, on the CPU also float32; with ``order`` any number of columns.
            words: int32 [K / row_channels, N * row_words] of the format (:attr:`WeightFormat.pack`); K and N
                multiples of 64.
            scales: [G, N] in ``x.dtype``, in stored order and times :meth:`WeightFormat.scale_factor`.
            zeros: None for symmetric weights, else zero points [G, N] in ``x.dtype``, stored order: integers
                from 0 to 127, which a GPU does not check.
            bias: None or [out_features] in ``x.dtype``, channel order.
            group_size: 32, 64, 128 or -1 (one group), of FP4 also 16.
            out_features: columns to return, at most N; the rest is padding.
            order: None or int32 [K], contiguous: channel j of the weight multiplies column ``order[j]`` of
                ``x`` (activation order); nothing where it is negative. Other entries have to be columns of
                ``x``, which a GPU does not check.

        Returns:
            [..., out_features] in ``x.dtype``, accumulated in float32.

        Raises:
            ValueError: an operand's shape or dtype does not fit.
            UnsupportedError: a shape or dtype the kernel can't run.
            EnvironmentProblem: CuPy, NVRTC or the driver is missing.
        """
        # A subclass of Tensor may hold its values elsewhere, and goes through the dispatcher.
        if not _traced() and type(x) is Tensor and nobody_watches():
            planned = find_planned(x, words, scales, zeros, bias, group_size, out_features, order)
            if planned is not None:
                return planned
        return overload(x, words, scales, zeros, bias, group_size, out_features, order)  # type: ignore[no-any-return]

    return gemm


OPERATORS: dict[str, GemmOperator] = {
    each.name: GemmOperator(each) for each in (INT4, INT4_SPARSE, INT8, E4M3, E2M1)
}
"""``torch.ops.marlinq.<operator>`` of every format."""

GEMMS: dict[str, Callable[..., Tensor]] = {name: _gemm(operator) for name, operator in OPERATORS.items()}
"""``GEMMS[format.name](x, words, scales, zeros, bias, group_size, out_features, order)``."""

w4a16_gemm = GEMMS[INT4.name]
"""The function of :data:`GEMMS` for 4-bit integers."""
