"""Running checkpoints: the quantised linear, loading, decoding."""

from __future__ import annotations

from marlinq.runtime.decoding import Decoder, StepDecision
from marlinq.runtime.generation import Generation, generate
from marlinq.runtime.linear import QuantLinear, RuntimeDecision, decide, quantized_linear
from marlinq.runtime.loading import LoadedModel, load
from marlinq.runtime.operand import MarlinOperand, marlin_operand, operand_refusal

__all__ = [
    "Decoder",
    "Generation",
    "LoadedModel",
    "MarlinOperand",
    "QuantLinear",
    "RuntimeDecision",
    "StepDecision",
    "decide",
    "generate",
    "load",
    "marlin_operand",
    "operand_refusal",
    "quantized_linear",
]
