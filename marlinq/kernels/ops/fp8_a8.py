"""``torch.ops.marlinq.fp8_a8_gemm``: FP8 activations times an FP8 weight in the kernels' words."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.weight_formats import E4M3
from marlinq.kernels.launch.eight_bit_product import GROUP, eight_bit_gemm
from marlinq.kernels.ops.rounding_operator import Operands, define_rounding_operator

_NAME = "fp8_a8_gemm"
_SCHEMA = (
    "(Tensor x, Tensor words, Tensor scales, Tensor? bias, Tensor? input_scale, int group_size, "
    "int out_features) -> Tensor"
)


def fp8_a8_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    group_size: int,
    out_features: int,
) -> Tensor:
    """``e4m3(x) @ W + bias``: activations are rounded to FP8 E4M3 with a scale of each row.

    Args:
        x: [..., K] bfloat16, on a CPU of any float dtype.
        words: int32 [K/16, 4N] of E4M3 codes, K and N multiples of 64.
        scales: [G, N] in ``x.dtype``, stored order.
        bias: None or [out_features] in ``x.dtype``.
        input_scale: None, or float32 []: the scale of all activations, instead of each row's own.
        group_size: -1 for a scale per output channel and per row of activations; 128 for scales per 128
            channels of both.
        out_features: columns to return, at most N.

    Returns:
        [..., out_features] in ``x.dtype``.

    Raises:
        ValueError: an operand's shape does not fit.
        UnsupportedError: activations on a GPU that are not bfloat16.
        EnvironmentProblem: CuPy, NVRTC or the driver is missing.
    """
    return torch.ops.marlinq.fp8_a8_gemm.default(  # type: ignore[no-any-return]
        x, words, scales, bias, input_scale, group_size, out_features
    )


def _operands(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    group_size: int,
    out_features: int,
) -> Operands:
    granularity = Granularity.from_group_size(group_size)
    weight = Operand.whole(E4M3, granularity, words, scales, None)
    k, n = weight.padded_shape
    if x.shape[-1] != k:
        raise ValueError(f"x: expected {k} columns (K of the weight), found {x.shape[-1]}")
    if group_size not in (-1, GROUP) or (input_scale is not None and group_size != -1):
        raise ValueError(f"group_size: expected -1, or {GROUP} without input_scale, found {group_size}")
    groups = granularity.groups(k)
    if scales.shape != (groups, n) or k % granularity.channels_per_group(k):
        raise ValueError(f"scales: expected [{groups}, {n}], found {list(scales.shape)}")
    group = granularity.for_channels(k).channels
    return Operands(x, weight, bias, out_features, input_scale, group)


def _multiply(given: Operands) -> Tensor:
    if given.x.dtype != torch.bfloat16:
        raise UnsupportedError(f"{_NAME}: x has dtype {given.x.dtype}; FP8 products give bfloat16")
    return eight_bit_gemm(given.x, given.weight, given.bias, given.input_scale)


define_rounding_operator(_NAME, _SCHEMA, E4M3, _operands, _multiply)
