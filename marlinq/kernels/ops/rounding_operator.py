"""Defines operators whose activations are rounded to FP8 before the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.kernels.ops.definition import define_operator
from marlinq.kernels.ops.gemm_reference import reference_rounded_gemm


class Operands(NamedTuple):
    """Operands of a product, whose shapes fit.

    Attributes:
        x: [..., K], activations.
        weight: packed weight [K, N].
        bias: None or [out_features].
        out_features: columns of the result, at most N.
        input_scale: None, or float32 []: the scale of all activations, instead of scales of their own.
        group: channels of a row of activations that share a scale; 0 for all.
    """

    x: Tensor
    weight: Operand
    bias: Tensor | None
    out_features: int
    input_scale: Tensor | None = None
    group: int = 0


def define_rounding_operator(
    name: str,
    schema: str,
    weight_format: WeightFormat,
    operands_of: Callable[..., Operands],
    multiply: Callable[[Operands], Tensor],
) -> None:
    """Define ``e4m3(x) @ W + bias``, whose arguments begin with x and words and end with ``out_features``.

    Args:
        name, schema: as in :func:`define_operator`.
        weight_format: format of the words.
        operands_of: function that checks the arguments' shapes.
        multiply: the product [M, N] on a GPU of activations [M, K] and a bias that is padded to N columns.
    """

    def cuda(*given: Any) -> Tensor:
        operands = operands_of(*given)
        x, bias = operands.x, operands.bias
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, operands.weight.padded_shape[1] - len(bias)))
        out = multiply(operands._replace(x=x.reshape(-1, x.shape[-1]), bias=bias))
        return out.view(*x.shape[:-1], -1)[..., : operands.out_features]

    def cpu(*given: Any) -> Tensor:
        return reference_rounded_gemm(*operands_of(*given))

    def meta(x: Tensor, words: Tensor, *others: Any) -> Tensor:
        return x.new_empty((*x.shape[:-1], words.shape[1] // weight_format.row_words))[..., : others[-1]]

    define_operator(name, schema, cuda, cpu, meta)
