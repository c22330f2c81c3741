"""This package's sparse kernel beside the dense one, on weights that both can multiply with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from marlinq.core.scheme import INT4, Scheme
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import QuantizedWeight
from marlinq.kernels.sparse import GROUPS, SparseOperand, sparse_gemm, sparse_operand
from marlinq.operations.bench.peers.base import Run
from marlinq.operations.bench.weights import Weight


class SparseContender:
    """Products on sparse tensor cores; the weight has to be a pruned one."""

    name = "sparse"
    any_format = False

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        if asymmetric:
            return "it has no zero points"
        sizes = [each.group_size for each in GROUPS]
        return None if group_size in sizes else f"it takes group sizes {', '.join(map(str, sizes))}"

    def nbytes(self, weight: Weight) -> int:
        return operand_of(weight).nbytes

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        operand = operand_of(weight)
        operands = [
            replace(operand, words=operand.words.clone(), masks=operand.masks.clone()) for _ in range(copies)
        ]
        for m in batches:
            # Compiled and loaded before anything is captured.
            sparse_gemm(operand.scales.new_zeros(m, weight.layer.k), operand)

        def run(copy: int, x: Tensor) -> Tensor:
            return sparse_gemm(x, operands[copy])

        return run


def operand_of(weight: Weight) -> SparseOperand:
    """A 2:4 pruned weight in the layout of the sparse kernel."""
    scheme = Scheme(INT4, weight.operand.granularity, "midpoint", sparsity=TWO_OF_FOUR)
    q = QuantizedWeight.from_codes(scheme, weight.codes(), scales=weight.natural_scales())
    return sparse_operand(q, weight.scales.dtype)
