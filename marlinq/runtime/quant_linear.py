"""A linear layer with a packed weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.kernels import GEMMS, Operand, device_numbers
from marlinq.kernels.choose.eight_bit_decision import decide_eight_bits
from marlinq.kernels.contract.demands import Demands, demands
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.launch import eight_bit_product, w4a8_product
from marlinq.kernels.ops.fp8_a8 import fp8_a8_gemm
from marlinq.kernels.ops.w4a8 import w4a8_gemm


def _least_rows(operand: Operand) -> int | None:
    """Number of rows from which activations are quantised; None for never."""
    words = operand.words
    if operand.activations is None or not words.is_cuda or operand.order is not None:
        return None
    device = device_numbers(words.get_device())
    return decide_eight_bits(operand.problem(1), operand.activations, device).least_rows


def _may_round() -> bool:
    """Whether no context demands a kernel or batch invariance."""
    return demands()._replace(dependent=False, early=False) == Demands()


class QuantLinear(nn.Module):
    """``y = x @ W.T + b`` with W as kernels read it; drop-in for ``nn.Linear`` and GPT-2's ``Conv1D``.

    ``forward`` takes x [..., K] in ``dtype`` and returns [..., N]. Buffers are not part of a state dict:
    a checkpoint keeps its own layout.

    Args:
        operand: the weight, on its device; its scales have the dtype of the activations: float16 or bfloat16,
            on the CPU also float32.
        bias: [N] or None, moved and cast to the operand's device and dtype.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, operand: Operand, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features = operand.in_features
        self.out_features = operand.out_features
        self.format = operand.format
        self.granularity = operand.granularity
        self._group_size = operand.granularity.group_size
        self.padded_shape = operand.padded_shape
        self._padding = operand.padded_shape[0] - operand.in_features
        self.activations = operand.activations
        self._least_rows = _least_rows(operand)
        for key in ("words", "scales", "zeros", "order", "input_scale"):
            self.register_buffer(key, getattr(operand, key), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.to(operand.scales), persistent=False)

    @property
    def operand(self) -> Operand:
        """The weight, whose tensors are the module's buffers, not copies."""
        return Operand(
            self.format,
            self.granularity,
            self.words,
            self.scales,
            self.zeros,
            self.order,
            self.in_features,
            self.out_features,
            self.activations,
            self.input_scale,
        )

    @property
    def rounds(self) -> bool:
        """Whether it quantises the activations of large batches."""
        return self._least_rows is not None

    def rounding_instantiations(self) -> list[Instantiation]:
        """The kernels of large batches whose activations are quantised; none where none are."""
        if not self.rounds:
            return []
        if self.format is INT4:
            return w4a8_product.instantiations(self.operand, self.words.get_device())
        return eight_bit_product.instantiations(self.operand)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As a module's; the power of two that scales are stored with follows their dtype."""
        self.scales = self.format.rescaled(self.scales, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], in the dtype of x."""
        # Read from the dictionary: looking buffers up as attributes takes longer than the call.
        held: dict[str, Any] = self._buffers
        order = held["order"]
        if order is None and self._padding:
            x = F.pad(x, (0, self._padding))
        least = self._least_rows
        if least is not None and x.numel() >= least * x.shape[-1] and _may_round():
            given = x, held["words"], held["scales"], held["bias"]
            if self.format is INT4:
                return w4a8_gemm(*given, self.out_features)
            if x.dtype == torch.bfloat16:
                return fp8_a8_gemm(*given, held["input_scale"], self._group_size, self.out_features)
        return GEMMS[self.format.name](
            x,
            held["words"],
            held["scales"],
            held["zeros"],
            held["bias"],
            self._group_size,
            self.out_features,
            order,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"granularity={self.granularity.describe()!r}, asymmetric={self.zeros is not None}, "
            f"act_order={self.order is not None}, bias={self.bias is not None}"
        )
