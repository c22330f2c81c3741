"""All layers of a decode step of one row in one launch (``cuda/kernels/persistent.cuh``).

It needs compute capability 9.0. For more rows a chain of kernels is faster, so it has no configuration for
them.
"""

from marlinq.kernels.launch.persistent.config import (
    StepConfig,
    choose,
    persistent_refusal,
    prepare_instantiation,
)
from marlinq.kernels.launch.persistent.layers import PersistentLayers
from marlinq.kernels.launch.persistent.operands import Activation, BiasedOperand, LayerOperands, Model

__all__ = [
    "Activation",
    "BiasedOperand",
    "LayerOperands",
    "Model",
    "PersistentLayers",
    "StepConfig",
    "choose",
    "persistent_refusal",
    "prepare_instantiation",
]
