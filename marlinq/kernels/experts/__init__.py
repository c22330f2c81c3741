"""Mixtures of experts: the grouped W4A16 products of a routed layer (docs/experts.md)."""

from __future__ import annotations

from marlinq.kernels.experts.layout import ExpertWeights, StoredExperts, interleave_gate_up
from marlinq.kernels.experts.operator import routed_experts
from marlinq.kernels.experts.reference import ACTIVATIONS, reference_experts

__all__ = [
    "ACTIVATIONS",
    "ExpertWeights",
    "StoredExperts",
    "interleave_gate_up",
    "reference_experts",
    "routed_experts",
]
