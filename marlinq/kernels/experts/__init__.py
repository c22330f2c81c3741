"""Mixtures of experts: the grouped W4A16 products of a routed layer (docs/experts.md)."""

from __future__ import annotations

from marlinq.kernels.experts.experts_op import routed_experts
from marlinq.kernels.experts.experts_reference import ACTIVATIONS, reference_experts
from marlinq.kernels.experts.stored_experts import ExpertWeights, StoredExperts, interleave_gate_up

__all__ = [
    "ACTIVATIONS",
    "ExpertWeights",
    "StoredExperts",
    "interleave_gate_up",
    "reference_experts",
    "routed_experts",
]
