"""The tensors of one product."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.problem import Problem


class ProductTensors(NamedTuple):
    """Inputs and output of :func:`marlinq.kernels.launch.call.launch_gemm`; K' and N' are padded K and N.

    Attributes:
        x: [M, K'], 16-bit, adjacent channels one element apart; channels in the order of the weight's rows.
        weight: the quantised weight.
        bias: [N'] in the dtype of ``x``, or None.
        out: [M, N'] in the dtype of ``x``; [M, N' / 2] where an activation joins gate and up.
    """

    x: Tensor
    weight: Operand
    bias: Tensor | None
    out: Tensor

    def problem(self, activation: str | None = None) -> Problem:
        """The product's shape and types, for which a kernel is chosen."""
        return self.weight.problem(self.x.shape[0], activation)
