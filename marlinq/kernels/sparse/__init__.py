"""Products with 4-bit 2:4 sparse weights on sparse tensor cores: ``cuda/sparse/stream.cuh``."""

from __future__ import annotations

from marlinq.kernels.sparse.config import GROUPS, SparseConfig, candidates, choose
from marlinq.kernels.sparse.launch import sparse_gemm
from marlinq.kernels.sparse.operand import SparseOperand, sparse_operand, sparse_refusal

__all__ = [
    "GROUPS",
    "SparseConfig",
    "SparseOperand",
    "candidates",
    "choose",
    "sparse_gemm",
    "sparse_operand",
    "sparse_refusal",
]
