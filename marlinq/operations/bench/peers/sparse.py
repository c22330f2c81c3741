"""This package's kernels with 2:4 sparse weights, on sparse tensor cores, beside the dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from marlinq.kernels import Operand, precompile
from marlinq.kernels.contract.weight_formats import INT4_SPARSE
from marlinq.operations.bench.peers.contenders import Run
from marlinq.operations.bench.peers.own import Marlinq
from marlinq.operations.bench.weights import Weight


class SparseContender(Marlinq):
    """Products on sparse tensor cores; the weight has to be a pruned one."""

    name = "sparse"
    any_format = False

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        return "it has no zero points" if asymmetric else None

    def nbytes(self, weight: Weight) -> int:
        return sparse_weight(weight).nbytes

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        sparse = sparse_weight(weight)
        precompile(map(sparse.operand.problem, batches), weight.words.device.index)
        return super().prepare(sparse, copies, batches)


def sparse_weight(weight: Weight) -> Weight:
    """A 2:4 pruned weight without its zeros."""
    words = INT4_SPARSE.pack(weight.codes())
    operand = Operand.whole(INT4_SPARSE, weight.operand.granularity, words, weight.scales, None)
    return replace(weight, operand=operand)
