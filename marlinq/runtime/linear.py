"""A linear layer with a quantised weight, and the choice of what multiplies it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import EnvironmentProblem
from marlinq.core.weight import QuantizedWeight
from marlinq.kernels import explain, w4a16_gemm
from marlinq.runtime.operand import MarlinOperand, marlin_operand, operand_refusal, operand_shape

Linears = Literal["auto", "kernel", "dense"]
"""What multiplies: the choice of :func:`decide`, the kernel (on a CPU its reference), or dense weights."""


@dataclass(frozen=True)
class RuntimeDecision:
    """What multiplies one quantised weight, and why.

    Attributes:
        path: ``kernel`` (CUDA), ``cpu-reference`` (the same op on the CPU) or ``dense`` (dequantised once at
            load, multiplied by torch).
        kernel: name of the kernel; ``torch`` for dense weights.
        reason: one clause, for people.
    """

    path: Literal["kernel", "cpu-reference", "dense"]
    kernel: str
    reason: str


def decide(
    q: QuantizedWeight, *, device: torch.device, dtype: torch.dtype, linears: Linears = "auto"
) -> RuntimeDecision:
    """How to multiply with ``q`` on ``device`` with activations of ``dtype``.

    Whatever the kernel can't hold is dequantised, with the reason.

    Raises:
        EnvironmentProblem: the kernel would fit, but the package that launches it is missing.
    """
    if linears == "dense":
        return RuntimeDecision("dense", "torch", "dense weights were asked for")
    refusal = operand_refusal(q)
    if refusal is not None:
        return RuntimeDecision("dense", "torch", refusal)
    if device.type == "cpu":
        if linears == "kernel":
            return RuntimeDecision("cpu-reference", "w4a16_gemm", "the kernel's CPU reference was asked for")
        return RuntimeDecision("dense", "torch", "no GPU; torch's dense product is the fastest on a CPU")
    if device.type != "cuda":
        return RuntimeDecision("dense", "torch", f"the kernel runs on CUDA devices, not on {device.type}")
    if dtype not in (torch.float16, torch.bfloat16):
        name = dtype_name(dtype)
        return RuntimeDecision("dense", "torch", f"the kernel takes float16 and bfloat16, not {name}")
    return _kernel_decision(q, device, dtype)


def _kernel_decision(q: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> RuntimeDecision:
    if find_spec("cupy") is None:
        raise EnvironmentProblem(
            "CuPy is not installed, which launches the kernel; install marlinq[cuda12] or marlinq[cuda13], "
            "matching the driver, or use --device cpu"
        )
    k, n, group_size = operand_shape(q)
    try:
        found = explain(device, dtype, 1, n, k, group_size, q.scheme.stores_zeros)
    except EnvironmentProblem as error:
        # An old GPU: nothing the user could install would change it.
        return RuntimeDecision("dense", "torch", str(error))
    return RuntimeDecision("kernel", found.kernel, f"for one token: {found.reason}")


def summarize(decisions: Iterable[RuntimeDecision]) -> list[str]:
    """One line for each different decision with the number of linears that it holds for, most first."""
    counts = Counter(decisions)
    return [
        f"{count} quantised linears: {decision.path} ({decision.kernel}): {decision.reason}"
        for decision, count in counts.most_common()
    ]


class QuantLinear(nn.Module):
    """``y = x @ W.T + b`` with W in the Marlin layout; drop-in for ``nn.Linear`` and GPT-2's ``Conv1D``.

    ``forward`` takes x [..., K] in ``dtype`` and returns [..., N]. Buffers are not part of a state dict:
    a checkpoint keeps its own layout.

    Args:
        q: the weight, moved to ``device``.
        bias: [N] or None.
        device: where the buffers live.
        dtype: float16 or bfloat16; on the CPU also float32.
        name: what error messages call the module.

    Raises:
        UnsupportedError: the kernel can't hold the weight (:func:`marlinq.runtime.operand.operand_refusal`).
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        q: QuantizedWeight,
        bias: Tensor | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        name: str = "weight",
    ) -> None:
        super().__init__()
        operand: MarlinOperand = marlin_operand(q.to(device), dtype, name=name)
        self.in_features = operand.in_features
        self.out_features = operand.out_features
        self.group_size = operand.group_size
        self._padding = operand.padded_shape[0] - operand.in_features
        for key in ("words", "scales", "zeros", "order"):
            self.register_buffer(key, getattr(operand, key), persistent=False)
        self.register_buffer(
            "bias", None if bias is None else bias.to(device=device, dtype=dtype), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], in the dtype of x."""
        # Found as attributes they would cost the host more than the call.
        held: dict[str, Any] = self._buffers
        order = held["order"]
        if order is None and self._padding:
            x = F.pad(x, (0, self._padding))
        return w4a16_gemm(
            x,
            held["words"],
            held["scales"],
            held["zeros"],
            held["bias"],
            self.group_size,
            self.out_features,
            order,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"group_size={self.group_size}, asymmetric={self.zeros is not None}, "
            f"act_order={self.order is not None}, bias={self.bias is not None}"
        )


def quantized_linear(
    q: QuantizedWeight,
    bias: Tensor | None,
    decision: RuntimeDecision,
    *,
    device: torch.device,
    dtype: torch.dtype,
    name: str = "weight",
) -> nn.Module:
    """The module that ``decision`` asks for: a :class:`QuantLinear`, or an ``nn.Linear`` of dense weights."""
    if decision.path != "dense":
        return QuantLinear(q, bias, device=device, dtype=dtype, name=name)
    linear = nn.Linear(q.in_features, q.out_features, bias=bias is not None, device="meta")
    weight = q.to(device).dequantize(dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(device=device, dtype=dtype), requires_grad=False)
    return linear
