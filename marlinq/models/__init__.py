"""Structure of decoder-only models, a copy in memory whose parts are loaded on demand, and block-wise
runs."""

from __future__ import annotations

from marlinq.models.blueprint import Block, Blueprint, build_blueprint, describe
from marlinq.models.building import parse_config
from marlinq.models.conversion import Conversion, ConvertedTensors, converted, find_conversions
from marlinq.models.fused_experts import Experts, ExpertTokens, expert_inputs, tapped_layer
from marlinq.models.instance import ModelInstance
from marlinq.models.names import TensorNames, without_false_ties
from marlinq.models.projection import Projection, fused_experts, shared_inputs, tapped
from marlinq.models.quantized_linears import check_linears, linears_in_memory, quantized_linears
from marlinq.models.replay import BlockReplay
from marlinq.models.residual_stream import StreamFinder, streams_at

__all__ = [
    "Block",
    "BlockReplay",
    "Blueprint",
    "Conversion",
    "ConvertedTensors",
    "ExpertTokens",
    "Experts",
    "ModelInstance",
    "Projection",
    "StreamFinder",
    "TensorNames",
    "build_blueprint",
    "check_linears",
    "converted",
    "describe",
    "expert_inputs",
    "find_conversions",
    "fused_experts",
    "linears_in_memory",
    "parse_config",
    "quantized_linears",
    "shared_inputs",
    "streams_at",
    "tapped",
    "tapped_layer",
    "without_false_ties",
]
