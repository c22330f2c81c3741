"""The operator for 2:4 sparse weights: on sparse tensor cores, on a CPU in torch."""

from __future__ import annotations

from marlinq.formats import StoredWeight
from marlinq.kernels.contract.weight_formats import INT4_SPARSE, WeightFormat
from marlinq.runtime.operators.operator import Setting
from marlinq.runtime.operators.packed import Packed


class Sparse(Packed):
    """:class:`~marlinq.runtime.quant_linear.QuantLinear` over the kept codes of sparse weights."""

    def __init__(self) -> None:
        super().__init__("sparse-w4a16", [INT4_SPARSE])

    def knows(self, stored: StoredWeight) -> bool:
        return stored.scheme.sparsity is not None

    def format_of(self, stored: StoredWeight) -> WeightFormat:
        return INT4_SPARSE

    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        if not self.knows(stored):
            return "dense weights, or a layout that stores the zeros of sparse ones; convert --to marlin-24"
        if stored.scheme.element.name != "int4":
            return f"{stored.scheme.element.name} weights; the kernel multiplies int4"
        return super().refusal(stored, setting)
