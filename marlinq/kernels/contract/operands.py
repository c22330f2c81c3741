"""The tensors of one product."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """What :func:`marlinq.kernels.launch.call.launch_gemm` is given, with two-dimensional ``x`` and ``out``.

    ``out`` has a column for every column of the weight, or half as many behind an activation.
    """

    x: Tensor
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    out: Tensor
