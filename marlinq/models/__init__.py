"""What a decoder-only model is made of, a live copy of it, and running that one block at a time."""

from __future__ import annotations

from marlinq.models.blueprint import Block, Blueprint, build_blueprint, describe
from marlinq.models.experts import Experts, tapped_experts
from marlinq.models.instance import ModelInstance, TensorSource
from marlinq.models.names import TensorNames
from marlinq.models.projection import Projection, fused_experts, shared_inputs, tapped
from marlinq.models.replay import BlockReplay

__all__ = [
    "Block",
    "BlockReplay",
    "Blueprint",
    "Experts",
    "ModelInstance",
    "Projection",
    "TensorNames",
    "TensorSource",
    "build_blueprint",
    "describe",
    "fused_experts",
    "shared_inputs",
    "tapped",
    "tapped_experts",
]
