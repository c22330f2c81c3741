"""The output head on a CPU: float16 weights with float32 activations, which read half the bytes of float32
weights.

A small model's step spends a third of its time reading the head. Torch's product of packed float16 weights
(``quantized::linear_dynamic_fp16``) widens each weight to float32 when it is read and sums in float32. So the
result equals a float32 head's but for the order of the sum, if every weight is a float16 value. Other weights
may differ from a float16 value by less than float32's rounding of the largest weight. BF16 heads meet that:
of their values only those below 2**-17 may be no float16 values, and they change by at most 2**-25.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.runtime.operators import Setting
from marlinq.runtime.operators.cpu_timing import seconds_in_turn

LEAST_GAIN = 1.2
"""Speed-up from which it is used: it costs memory, since the float32 weight of a tied head stays for the
embedding."""

_LEAST_VALUES = 1 << 20  # weights of the smallest head considered; a smaller one takes negligible time
_ROUNDOFF = 2**-24  # relative rounding error of float32
_SLAB = 4096
_OPERATIONS = ("linear_prepack_fp16", "linear_dynamic_fp16")


class HalfWeightLinear(nn.Module):
    """``y = x @ W.T + b`` with W packed in float16, x, b, the sum and y in float32.

    Args:
        linear: linear of float32 weights that float16 holds; not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), linear.bias)
        self.packed_bytes = 2 * self.in_features * self.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], float32."""
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_head(model: PreTrainedModel, setting: Setting) -> list[str]:
    """Replace ``model``'s head by one of float16 weights where that is exact and measured to be faster.

    Returns:
        The decision and its reason in at most one line; empty where there was nothing to decide.
    """
    head = model.get_output_embeddings()
    if setting.device.type != "cpu" or setting.dtype != torch.float32 or type(head) is not nn.Linear:
        return []
    if head.weight.numel() < _LEAST_VALUES:
        return []
    shape = f"head of {head.in_features} x {head.out_features}"
    if not all(hasattr(torch.ops.quantized, operation) for operation in _OPERATIONS):
        return [f"{shape}: float32; torch {torch.__version__} has no product of float16 weights for this CPU"]
    if not _float16_holds(head.weight):
        return [f"{shape}: float32; float16 does not hold its weights"]
    packed = HalfWeightLinear(head)
    packed_seconds, seconds = _measure(head, packed)
    times = f"{packed_seconds * 1e6:.0f} us measured, {seconds * 1e6:.0f} us in float32"
    if packed_seconds * LEAST_GAIN > seconds:
        return [f"{shape}: float32; packed in float16 it is not {LEAST_GAIN:g} times faster: {times}"]
    model.set_output_embeddings(packed)
    return [f"{shape}: float16 weights under float32 activations, which loses nothing: {times}"]


@torch.no_grad()
def _measure(head: nn.Linear, packed: HalfWeightLinear) -> tuple[float, float]:
    x = torch.ones(1, head.in_features)
    packed_seconds, seconds = seconds_in_turn(
        [lambda: packed(x)], [lambda: F.linear(x, head.weight, head.bias)]
    )
    return packed_seconds, seconds


@torch.no_grad()
def _float16_holds(weight: Tensor) -> bool:
    largest = weight.abs().max()
    bound = _ROUNDOFF * largest
    # In slabs, since the weight is large.
    return bool(torch.isfinite(largest)) and all(
        bool(((rows - rows.half().float()).abs() <= bound).all()) for rows in torch.split(weight, _SLAB)
    )
