"""``torch.ops.marlinq.w4a16_gemm``: the GEMM as a torch operator on CUDA, CPU and meta tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.launch import plans
from marlinq.kernels.launch.gather import gather_channels
from marlinq.kernels.launch.launch import launch_gemm
from marlinq.kernels.ops.reference import reference_gemm

_library = torch.library.Library("marlinq", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4a16_gemm(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, "
    "int group_size, int out_features, Tensor? order=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _check(x: Tensor, weight: plans.Weight, group_size: int, n_out: int) -> None:
    words, scales, zeros, bias, order = weight
    k, n = words.shape[0] * 16, words.shape[-1] // 2
    if words.dtype != torch.int32 or words.dim() != 2 or n % 64:
        raise ValueError(
            f"words: expected int32 [K/16, 2N], N % 64 == 0, found {words.dtype} {list(words.shape)}"
        )
    if order is not None:
        if order.shape != (k,) or order.dtype != torch.int32:
            raise ValueError(f"order: expected int32 [{k}], found {order.dtype} {list(order.shape)}")
    elif x.shape[-1] != k:
        raise ValueError(f"x: expected {k} columns (K of the weight), found {x.shape[-1]}")
    # A group as long as K is stored like a single one.
    groups = 1 if group_size < 1 else k // group_size
    for name, value in (("scales", scales), ("zeros", zeros)):
        if value is not None and (value.shape != (groups, n) or value.dtype != x.dtype):
            raise ValueError(
                f"{name}: expected {x.dtype} [{groups}, {n}] with group size {group_size}, "
                f"found {value.dtype} {list(value.shape)}"
            )
    if not 0 < n_out <= n:
        raise ValueError(f"out_features: expected 1..{n}, found {n_out}")
    if bias is not None and (bias.shape != (n_out,) or bias.dtype != x.dtype):
        raise ValueError(f"bias: expected {x.dtype} [{n_out}], found {bias.dtype} {list(bias.shape)}")
    named = (("words", words), ("scales", scales), ("zeros", zeros), ("bias", bias), ("order", order))
    for name, value in named:
        if value is not None and (value.device != x.device or not value.is_contiguous()):
            raise ValueError(
                f"{name}: expected a contiguous tensor on {x.device}, the device of x, "
                f"found strides {value.stride()} on {value.device}"
            )


def _result(x: Tensor, words: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """Memory for all N columns, which the kernels write, and the view of it that the operator returns."""
    out = x.new_empty((*x.shape[:-1], words.shape[1] // 2))
    return out, out[..., :out_features]


def _cuda(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out_features: int,
    order: Tensor | None = None,
) -> Tensor:
    key = id(words), id(scales), id(zeros), id(bias), id(order), group_size, out_features, x.dtype
    plan = plans.find(key)
    if plan is not None:
        planned = plan.run(x, words, scales, zeros, bias, order)
        if planned is not None:
            return planned
    weight = words, scales, zeros, bias, order
    _check(x, weight, group_size, out_features)
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"w4a16_gemm: x has dtype {x.dtype}; the kernel takes float16 and bfloat16")
    n = words.shape[1] // 2
    for name, value in (("words", words), ("scales", scales), ("zeros", zeros), ("order", order)):
        if value is not None and value.data_ptr() % 16:
            raise ValueError(f"{name}: expected memory aligned to 16 bytes, found address {value.data_ptr()}")
    if scales.shape[0] == 1:
        group_size = -1
    if bias is None or out_features == n:
        plans.remember(key, weight, group_size, out_features)
    rows = x.reshape(-1, x.shape[-1])
    row = rows.stride(0)
    if order is not None:
        if rows.shape[0]:
            rows = gather_channels(rows if rows.stride(1) == 1 else rows.contiguous(), order)
    # The kernels copy 16-byte pieces of rows, and the rows of a tensor map don't overlap.
    elif rows.stride(1) != 1 or row % 8 or row < rows.shape[1] or rows.data_ptr() % 16:
        rows = (
            rows.contiguous()
            if rows.data_ptr() % 16 == 0
            else rows.clone(memory_format=torch.contiguous_format)
        )
    if bias is not None and out_features != n:
        bias = torch.nn.functional.pad(bias, (0, n - out_features))
    out, returned = _result(x, words, out_features)
    if rows.shape[0]:
        launch_gemm(
            rows, words, scales, zeros, bias, group_size, out.view(-1, n), behind_own=order is not None
        )
    return returned


def _cpu(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out_features: int,
    order: Tensor | None = None,
) -> Tensor:
    _check(x, (words, scales, zeros, bias, order), group_size, out_features)
    _, returned = _result(x, words, out_features)
    return returned.copy_(reference_gemm(x, words, scales, zeros, bias, out_features, order))


def _meta(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out_features: int,
    order: Tensor | None = None,
) -> Tensor:
    _, returned = _result(x, words, out_features)
    return returned


_library.impl("w4a16_gemm", _cuda, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("w4a16_gemm", _cpu, "CPU")  # type: ignore[no-untyped-call]
_library.impl("w4a16_gemm", _meta, "Meta")  # type: ignore[no-untyped-call]

# Without its name torch would look for the fitting overload at every call.
_operator = torch.ops.marlinq.w4a16_gemm.default


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
        zeros: None for symmetric weights, else zero points [G, N] in ``x.dtype``, stored order: whole numbers
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
    return _operator(  # type: ignore[no-any-return]
        x, words, scales, zeros, bias, group_size, out_features, order
    )
