"""What a decoder-only model is made of, and running it one block at a time."""

from __future__ import annotations

from marlinq.models.loader import BlockLoader, TensorSource
from marlinq.models.names import TensorNames
from marlinq.models.replay import BlockReplay, linear_inputs, shared_inputs
from marlinq.models.structure import (
    Block,
    DecoderStructure,
    LinearModule,
    build_structure,
    describe,
    is_linear,
)

__all__ = [
    "Block",
    "BlockLoader",
    "BlockReplay",
    "DecoderStructure",
    "LinearModule",
    "TensorNames",
    "TensorSource",
    "build_structure",
    "describe",
    "is_linear",
    "linear_inputs",
    "shared_inputs",
]
