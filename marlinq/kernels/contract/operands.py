"""The tensors of one product."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.problem import Problem


class Operands(NamedTuple):
    """What :func:`marlinq.kernels.launch.call.launch_gemm` multiplies and where to.

    Attributes:
        x: [M, K'], 16-bit, unit stride along rows; channels in the weight's stored order.
        weight: the quantised weight.
        bias: [N'] in the dtype of ``x``, or None.
        out: [M, N'] in the dtype of ``x``, or half as many columns behind an activation.
    """

    x: Tensor
    weight: Operand
    bias: Tensor | None
    out: Tensor

    def problem(self, activation: str | None = None) -> Problem:
        """What is decided."""
        return self.weight.problem(self.x.shape[0], activation)
