"""The head of a model on a CPU: float16 weights under float32 activations, half the bytes of a float32 one.

A small model's step reads its head for a third of the time. Checkpoints hold it in 16 bits, a CPU that
computes in float32 would read 32. Torch's product of packed float16 weights
(``quantized::linear_dynamic_fp16``) widens each weight to float32 as it is read and adds up in float32, so
nothing but the order of the sum differs from a float32 head, provided that every weight is a float16 value.
One that is not has to be off by less than float32's own rounding of the largest weight. That lets BF16 heads
in: of their values only those below 2**-17 may be no float16 values, and they move by 2**-25 at most.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.runtime.operators import Setting
from marlinq.runtime.operators.cpu_timing import seconds_in_turn

LEAST_GAIN = 1.2
"""How many times faster it has to be: the float32 weight of a tied head stays for the embedding."""

_LEAST_VALUES = 1 << 20  # a smaller head takes no time that anybody would notice
_ROUNDOFF = 2**-24  # of float32
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
        What was decided and why, in at most one line; nothing where there was nothing to decide.
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
    # A slab at a time: a vocabulary's weight is large.
    return bool(torch.isfinite(largest)) and all(
        bool(((rows - rows.half().float()).abs() <= bound).all()) for rows in torch.split(weight, _SLAB)
    )
