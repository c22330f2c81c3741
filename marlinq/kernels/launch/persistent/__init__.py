"""A decode step's layers in one launch (``cuda/kernels/persistent.cuh``), on compute capability 9.0 alone.

One row is what it is made for. Up to eight rows are right, but slower than a chain of kernels
(docs/lab-notes/2026-11-22-persistent-step.md).
"""

from marlinq.kernels.launch.persistent.config import (
    StepConfig,
    choose,
    persistent_refusal,
    prepare_instantiation,
)
from marlinq.kernels.launch.persistent.layers import PersistentLayers
from marlinq.kernels.launch.persistent.operands import Activation, LayerOperands, Model, Operand

__all__ = [
    "Activation",
    "LayerOperands",
    "Model",
    "Operand",
    "PersistentLayers",
    "StepConfig",
    "choose",
    "persistent_refusal",
    "prepare_instantiation",
]
