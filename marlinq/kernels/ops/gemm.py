"""The GEMM of a weight format as a torch operator on CUDA, CPU and meta tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.operands import Operands
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.kernels.launch import plans
from marlinq.kernels.launch.call import launch_gemm
from marlinq.kernels.launch.gather import gather_channels
from marlinq.kernels.ops.reference import reference_gemm

_LIBRARY = torch.library.Library("marlinq", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = (
    "(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, "
    "int group_size, int out_features, Tensor? order=None) -> Tensor"
)


class GemmOperator:
    """``torch.ops.marlinq.<operator>`` of a weight format; arguments as :func:`marlinq.kernels.w4a16_gemm`.

    Attributes:
        format: the weight's.
        overload: what to call; without its name torch would look for the fitting overload at every call.
    """

    def __init__(self, weight_format: WeightFormat) -> None:
        self.format = weight_format
        name = weight_format.operator
        _LIBRARY.define(name + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        for function, key in ((self.cuda, "CUDA"), (self.cpu, "CPU"), (self.meta, "Meta")):
            _LIBRARY.impl(name, function, key)  # type: ignore[no-untyped-call]
        self.overload = getattr(torch.ops.marlinq, name).default

    def _result(self, x: Tensor, words: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
        """Memory for all N columns, which the kernels write, and the view of it that the operator returns."""
        out = x.new_empty((*x.shape[:-1], words.shape[1] // self.format.row_words))
        return out, out[..., :out_features]

    def _operand(
        self, words: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, order: Tensor | None
    ) -> Operand:
        granularity = Granularity.from_group_size(group_size)
        return Operand.whole(self.format, granularity, words, scales, zeros, order)

    def planned(
        self,
        x: Tensor,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        out_features: int,
        order: Tensor | None = None,
    ) -> Tensor | None:
        """The product by the weight's plan; None where there is none, or it does not serve this call."""
        plan = plans.find(
            (id(words), id(scales), id(zeros), id(bias), id(order), group_size, out_features, x.dtype, self)
        )
        return None if plan is None else plan.run(x, words, scales, zeros, bias, order)

    def cuda(
        self,
        x: Tensor,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        out_features: int,
        order: Tensor | None = None,
    ) -> Tensor:
        planned = self.planned(x, words, scales, zeros, bias, group_size, out_features, order)
        if planned is not None:
            return planned
        key = id(words), id(scales), id(zeros), id(bias), id(order), group_size, out_features, x.dtype, self
        weight = words, scales, zeros, bias, order
        _check(self.format, x, weight, group_size, out_features)
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(
                f"{self.format.operator}: x has dtype {x.dtype}; the kernel takes float16 and bfloat16"
            )
        n = words.shape[1] // self.format.row_words
        for name, value in (("words", words), ("scales", scales), ("zeros", zeros), ("order", order)):
            if value is not None and value.data_ptr() % 16:
                raise ValueError(
                    f"{name}: expected memory aligned to 16 bytes, found address {value.data_ptr()}"
                )
        operand = self._operand(words, scales, zeros, group_size, order)
        if bias is None or out_features == n:
            plans.remember(key, weight, operand.granularity, out_features, self.format)
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
        out, returned = self._result(x, words, out_features)
        if rows.shape[0]:
            operands = Operands(rows, operand, bias, out.view(-1, n))
            launch_gemm(operands, behind_own=order is not None)
        return returned

    def cpu(
        self,
        x: Tensor,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        out_features: int,
        order: Tensor | None = None,
    ) -> Tensor:
        _check(self.format, x, (words, scales, zeros, bias, order), group_size, out_features)
        _, returned = self._result(x, words, out_features)
        operand = self._operand(words, scales, zeros, group_size, order)
        return returned.copy_(reference_gemm(x, operand, bias, out_features))

    def meta(
        self,
        x: Tensor,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        group_size: int,
        out_features: int,
        order: Tensor | None = None,
    ) -> Tensor:
        _, returned = self._result(x, words, out_features)
        return returned


def _check(weight_format: WeightFormat, x: Tensor, weight: plans.Weight, group_size: int, n_out: int) -> None:
    words, scales, zeros, bias, order = weight
    if words.dtype != torch.int32 or words.dim() != 2 or words.shape[1] % (64 * weight_format.row_words):
        raise ValueError(
            f"words: expected int32 [K/{weight_format.row_channels}, {weight_format.row_words}N], "
            f"N % 64 == 0, found {words.dtype} {list(words.shape)}"
        )
    k, n = weight_format.shape(words)
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
