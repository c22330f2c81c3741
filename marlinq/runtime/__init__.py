"""Running checkpoints: operators and the choice among them, loading, decode steps, generation."""

from __future__ import annotations

from marlinq.runtime.decoding import Decoder, StepDecision
from marlinq.runtime.generation import Generation, Generations, Interrupted, generate, generate_batch
from marlinq.runtime.kernel_operand import marlin_operand, operand_refusal, stored_operand
from marlinq.runtime.loading import LoadedModel, load
from marlinq.runtime.operator_choice import Decision, OperatorCandidate, decide
from marlinq.runtime.operators import OPERATORS, Estimate, Operator, Setting, register_operator
from marlinq.runtime.quant_linear import QuantLinear
from marlinq.runtime.sampling import GREEDY, Sampling

__all__ = [
    "GREEDY",
    "OPERATORS",
    "Decision",
    "Decoder",
    "Estimate",
    "Generation",
    "Generations",
    "Interrupted",
    "LoadedModel",
    "Operator",
    "OperatorCandidate",
    "QuantLinear",
    "Sampling",
    "Setting",
    "StepDecision",
    "decide",
    "generate",
    "generate_batch",
    "load",
    "marlin_operand",
    "operand_refusal",
    "register_operator",
    "stored_operand",
]
