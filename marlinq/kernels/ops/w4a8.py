"""``torch.ops.marlinq.w4a8_gemm``: FP8 activations times a 4-bit weight in the kernels' words."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.launch.w4a8_product import w4a8_product
from marlinq.kernels.ops.definition import define_operator
from marlinq.kernels.ops.gemm_reference import reference_rounded_gemm
from marlinq.kernels.variants.warpgroup_fp8 import GROUP

_NAME = "w4a8_gemm"
_SCHEMA = "(Tensor x, Tensor words, Tensor scales, Tensor? bias, int out_features) -> Tensor"


def w4a8_gemm(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``e4m3(x) @ W + bias``: activations are rounded to FP8 E4M3, with a scale of each row and 128 channels.

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


class _Arguments(NamedTuple):
    """The operator's arguments, as :func:`w4a8_gemm` takes them."""

    x: Tensor
    words: Tensor
    scales: Tensor
    bias: Tensor | None
    out_features: int


def _operand(arguments: _Arguments) -> Operand:
    x, words, scales, bias, out_features = arguments
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
    return weight


def _cuda(*given: Any) -> Tensor:
    arguments = _Arguments(*given)
    weight = _operand(arguments)
    x, bias = arguments.x, arguments.bias
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"{_NAME}: x has dtype {x.dtype}; the kernel takes float16 and bfloat16")
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, weight.padded_shape[1] - len(bias)))
    out = w4a8_product(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], -1)[..., : arguments.out_features]


def _cpu(*given: Any) -> Tensor:
    arguments = _Arguments(*given)
    return reference_rounded_gemm(arguments.x, _operand(arguments), arguments.bias, arguments.out_features)


def _meta(*given: Any) -> Tensor:
    arguments = _Arguments(*given)
    x, columns = arguments.x, arguments.words.shape[1] // INT4.row_words
    return x.new_empty((*x.shape[:-1], columns))[..., : arguments.out_features]


define_operator(_NAME, _SCHEMA, _cuda, _cpu, _meta)
