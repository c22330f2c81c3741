"""The weight dequantised once at load, multiplied by torch: any scheme, any device, any dtype."""

from __future__ import annotations

from torch import Tensor, nn

from marlinq.core.errors import EnvironmentProblem
from marlinq.formats import StoredWeight
from marlinq.kernels import device_numbers
from marlinq.runtime.operators.operator import Estimate, Operator, Setting

# Seconds of torch's product on a GPU for the smallest weight.
_LEAST_SECONDS = 3e-6
# Rows up to which reading the weight takes longer than arithmetic; beyond, there is no estimate.
_MEMORY_BOUND_ROWS = 64


class Dense(Operator):
    """``nn.Linear`` over the dequantised weight."""

    name = "dense"
    dense = True

    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        return None

    def estimate(self, stored: StoredWeight, setting: Setting, rows: int) -> Estimate:
        nbytes = stored.in_features * stored.out_features * setting.dtype.itemsize
        reason = "torch's product with the dequantised weight"
        if setting.device.type != "cuda" or rows > _MEMORY_BOUND_ROWS:
            return Estimate(None, reason)
        try:
            bandwidth = device_numbers(setting.device.index or 0).bandwidth
        except EnvironmentProblem:
            return Estimate(None, reason)
        seconds = _LEAST_SECONDS + nbytes / bandwidth
        return Estimate(seconds, f"{reason}: at least {seconds * 1e6:.1f} us to read {nbytes / 1e6:.1f} MB")

    def build(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> nn.Module:
        linear = nn.Linear(stored.in_features, stored.out_features, bias=bias is not None, device="meta")
        weight = stored.weight(setting.device).dequantize(setting.dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            moved = bias.to(device=setting.device, dtype=setting.dtype)
            linear.bias = nn.Parameter(moved, requires_grad=False)
        return linear
