"""The operator for 2:4 sparse weights: sparse tensor cores, on a CPU torch arithmetic."""

from __future__ import annotations

from torch import Tensor, nn

from marlinq.core.errors import EnvironmentProblem
from marlinq.formats import StoredWeight
from marlinq.kernels import device_numbers
from marlinq.kernels.sparse import SparseOperand, sparse_gemm, sparse_operand, sparse_refusal
from marlinq.runtime.operators.base import Estimate, Operator, Setting, kernel_refusal


class SparseLinear(nn.Module):
    """``y = x @ W.T + b`` with a sparse W; ``forward`` takes x [..., K] and returns [..., N].

    Args:
        operand: the weight, on its device; its scales have the dtype of the activations.
        bias: [N] or None, moved and cast to the operand's device and dtype.
    """

    def __init__(self, operand: SparseOperand, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = operand.in_features, operand.out_features
        self.granularity = operand.granularity
        for key in ("words", "masks", "scales"):
            self.register_buffer(key, getattr(operand, key), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.to(operand.scales), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], in the dtype of x."""
        held = self._buffers
        words, masks, scales = held["words"], held["masks"], held["scales"]
        assert words is not None
        assert masks is not None
        assert scales is not None
        operand = SparseOperand(words, masks, scales, self.granularity)
        out = sparse_gemm(x.reshape(-1, self.in_features), operand, held["bias"])
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"granularity={self.granularity.describe()!r}, bias={self.bias is not None}"
        )


class Sparse(Operator):
    """:class:`SparseLinear` over the kept codes of a layout of sparse weights."""

    name = "sparse-w4a16"

    def knows(self, stored: StoredWeight) -> bool:
        return stored.scheme.sparsity is not None

    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        if not self.knows(stored):
            return "dense weights, or a layout that stores the zeros of sparse ones; convert --to marlin-24"
        reason = sparse_refusal(stored.grid)
        if reason is not None or setting.device.type == "cpu":
            return reason
        reason = kernel_refusal(setting)
        if reason is not None:
            return reason
        try:
            device_numbers(setting.device.index or 0)
        except EnvironmentProblem as error:
            return str(error)
        return None

    def estimate(self, stored: StoredWeight, setting: Setting, rows: int) -> Estimate:
        if setting.device.type == "cpu":
            return Estimate(None, "a CPU runs its reference, which unpacks the weight for every product")
        return Estimate(None, "the sparse kernel, whose times are not modelled yet")

    def build(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> nn.Module:
        return SparseLinear(sparse_operand(stored.weight(setting.device), setting.dtype), bias)
