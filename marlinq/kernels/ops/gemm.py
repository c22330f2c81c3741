"""The GEMM of a weight format as a torch operator on CUDA, CPU and meta tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.kernels.launch import plans
from marlinq.kernels.launch.call import launch_gemm
from marlinq.kernels.launch.gather import gather_channels
from marlinq.kernels.ops.definition import define_operator
from marlinq.kernels.ops.gemm_reference import reference_gemm

_SCHEMA = (
    "(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, "
    "int group_size, int out_features, Tensor? order=None) -> Tensor"
)


class GemmArguments(NamedTuple):
    """The operator's arguments, described at :func:`marlinq.kernels.w4a16_gemm`."""

    x: Tensor
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    group_size: int
    out_features: int
    order: Tensor | None = None

    @property
    def weight(self) -> plans.Weight:
        """The weight's tensors: words, scales, zero points, bias and order."""
        return self.words, self.scales, self.zeros, self.bias, self.order

    def operand(self, weight_format: WeightFormat) -> Operand:
        """The weight, with its words in ``weight_format``."""
        granularity = Granularity.from_group_size(self.group_size)
        return Operand.whole(weight_format, granularity, self.words, self.scales, self.zeros, self.order)

    def result(self, weight_format: WeightFormat) -> tuple[Tensor, Tensor]:
        """A new tensor of all N columns, for the kernels to write, and its view with ``out_features``
        columns."""
        columns = self.words.shape[1] // weight_format.row_words
        out = self.x.new_empty((*self.x.shape[:-1], columns))
        return out, out[..., : self.out_features]


class GemmOperator:
    """``torch.ops.marlinq.<operator>`` of a weight format; arguments as :func:`marlinq.kernels.w4a16_gemm`.

    Attributes:
        format: weight format of the words.
        overload: the operator's default overload; calling it directly spares torch the search for one.
    """

    def __init__(self, weight_format: WeightFormat) -> None:
        self.format = weight_format
        self.overload = define_operator(weight_format.operator, _SCHEMA, self.cuda, self.cpu, self.meta)

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
        """The product by the weight's plan; None without a plan, or where it does not fit this call."""
        plan = plans.find(
            (id(words), id(scales), id(zeros), id(bias), id(order), group_size, out_features, x.dtype, self)
        )
        return None if plan is None else plan.run(x, words, scales, zeros, bias, order)

    def cuda(self, *given: Any) -> Tensor:
        """The product on a GPU; ``given``, also of :meth:`cpu` and :meth:`meta`, are
        :class:`GemmArguments`."""
        planned = self.planned(*given)
        if planned is not None:
            return planned
        arguments = GemmArguments(*given)
        x, words, scales, zeros, bias, group_size, out_features, order = arguments
        _check(self.format, arguments)
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(
                f"{self.format.operator}: x has dtype {x.dtype}; the kernel takes float16 and bfloat16"
            )
        for name, value in (("words", words), ("scales", scales), ("zeros", zeros), ("order", order)):
            if value is not None and value.data_ptr() % 16:
                raise ValueError(
                    f"{name}: expected memory aligned to 16 bytes, found address {value.data_ptr()}"
                )
        operand = arguments.operand(self.format)
        out, returned = arguments.result(self.format)
        n = out.shape[-1]
        if bias is None or out_features == n:
            key = *map(id, arguments.weight), group_size, out_features, x.dtype, self
            plans.remember(key, arguments.weight, operand.granularity, out_features, self.format)
        rows = x.reshape(-1, x.shape[-1])
        row = rows.stride(0)
        if order is not None:
            if rows.shape[0]:
                rows = gather_channels(rows if rows.stride(1) == 1 else rows.contiguous(), order)
        # Copied where kernels can't read it: they load 16-byte pieces of rows, and rows of a tensor map must
        # not overlap.
        elif rows.stride(1) != 1 or row % 8 or row < rows.shape[1] or rows.data_ptr() % 16:
            rows = (
                rows.contiguous()
                if rows.data_ptr() % 16 == 0
                else rows.clone(memory_format=torch.contiguous_format)
            )
        if bias is not None and out_features != n:
            bias = torch.nn.functional.pad(bias, (0, n - out_features))
        if rows.shape[0]:
            operands = ProductTensors(rows, operand, bias, out.view(-1, n))
            launch_gemm(operands, behind_own=order is not None)
        return returned

    def cpu(self, *given: Any) -> Tensor:
        arguments = GemmArguments(*given)
        _check(self.format, arguments)
        _, returned = arguments.result(self.format)
        operand = arguments.operand(self.format)
        return returned.copy_(reference_gemm(arguments.x, operand, arguments.bias, arguments.out_features))

    def meta(self, *given: Any) -> Tensor:
        return GemmArguments(*given).result(self.format)[1]


def _check(weight_format: WeightFormat, arguments: GemmArguments) -> None:
    x, words, scales, zeros, bias, group_size, n_out, order = arguments
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
    # One group of K channels is stored like one scale per column.
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
