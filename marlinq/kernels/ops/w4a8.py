"""``torch.ops.marlinq.w4a8_gemm``: FP8 activations times a 4-bit weight in the kernels' words."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.launch.w4a8_product import w4a8_product
from marlinq.kernels.ops.rounding_operator import Operands, define_rounding_operator
from marlinq.kernels.variants.warpgroup_fp8 import GROUP

_NAME = "w4a8_gemm"
_SCHEMA = "(Tensor x, Tensor words, Tensor scales, Tensor? bias, int out_features) -> Tensor"


def w4a8_gemm(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``e4m3(x) @ W + bias``: activations are rounded to FP8 E4M3, with a scale of each row.

    Args:
        x: [..., K] float16 or bfloat16, on a CPU of any float dtype.
        words: int32 [K/16, 2N] of symmetric 4-bit codes, K a multiple of 128, N of 64.
        scales: [K/128, N] in ``x.dtype``, stored order.
        bias: None or [out_features] in ``x.dtype``.
        out_features: columns to return, at most N.

    Returns:
        [..., out_features] in ``x.dtype``.

    Raises:
        ValueError: an operand's shape or dtype does not fit.
        UnsupportedError: the GPU is not of compute capability 9.0.
        EnvironmentProblem: CuPy, NVRTC or the driver is missing.
    """
    return torch.ops.marlinq.w4a8_gemm.default(x, words, scales, bias, out_features)  # type: ignore[no-any-return]


def _operands(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Operands:
    weight = Operand.whole(INT4, Granularity.group(GROUP), words, scales, None)
    k, n = weight.padded_shape
    if x.shape[-1] != k:
        raise ValueError(f"x: expected {k} columns (K of the weight), found {x.shape[-1]}")
    if scales.shape != (k // GROUP, n) or k % GROUP or scales.dtype != x.dtype:
        raise ValueError(
            f"scales: expected {x.dtype} [{k // GROUP}, {n}] and K a multiple of {GROUP}, "
            f"found {scales.dtype} {list(scales.shape)} and K = {k}"
        )
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != x.dtype):
        raise ValueError(f"bias: expected {x.dtype} [{out_features}], found {bias.dtype} {list(bias.shape)}")
    return Operands(x, weight, bias, out_features)


def _multiply(given: Operands) -> Tensor:
    if given.x.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"{_NAME}: x has dtype {given.x.dtype}; the kernel takes float16 and bfloat16")
    return w4a8_product(given.x, given.weight, given.bias)


define_rounding_operator(_NAME, _SCHEMA, INT4, _operands, _multiply)
