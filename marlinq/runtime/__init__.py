"""Running checkpoints: operators, the decision for one, loading, decoding."""

from __future__ import annotations

from marlinq.runtime.decision import Candidate, Decision, decide
from marlinq.runtime.decoding import Decoder, StepDecision
from marlinq.runtime.generation import Generation, generate
from marlinq.runtime.linear import QuantLinear
from marlinq.runtime.loading import LoadedModel, load
from marlinq.runtime.operand import MarlinOperand, marlin_operand, operand_refusal, stored_operand
from marlinq.runtime.operators import OPERATORS, Estimate, Operator, Setting, register_operator

__all__ = [
    "OPERATORS",
    "Candidate",
    "Decision",
    "Decoder",
    "Estimate",
    "Generation",
    "LoadedModel",
    "MarlinOperand",
    "Operator",
    "QuantLinear",
    "Setting",
    "StepDecision",
    "decide",
    "generate",
    "load",
    "marlin_operand",
    "operand_refusal",
    "register_operator",
    "stored_operand",
]
