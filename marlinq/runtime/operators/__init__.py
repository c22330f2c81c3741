"""Operators, one file each, and their registry."""

from __future__ import annotations

from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8
from marlinq.runtime.operators.dense import Dense
from marlinq.runtime.operators.int4pack import Int4Pack
from marlinq.runtime.operators.operator import Estimate, Operator, Setting
from marlinq.runtime.operators.packed import Packed
from marlinq.runtime.operators.sparse import Sparse

OPERATORS: dict[str, Operator] = {}
"""Every operator by name. Of two operators without estimates the one registered first is chosen."""


def register_operator(operator: Operator) -> Operator:
    """Let :func:`marlinq.runtime.decide` consider ``operator`` for every module; returns it."""
    OPERATORS[operator.name] = operator
    return operator


for _operator in (
    Dense(),
    Packed("w4a16", [INT4]),
    Packed("w8a16", [INT8, E4M3]),
    Packed("fp4a16", [E2M1]),
    Int4Pack(),
    Sparse(),
):
    register_operator(_operator)

__all__ = ["OPERATORS", "Estimate", "Operator", "Setting", "register_operator"]
