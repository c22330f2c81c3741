"""Random experts in the kernels' layout, made on the device that will run them."""

from __future__ import annotations

import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.experts import ExpertWeights, StoredExperts
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.peers import random_weight
from marlinq.operations.bench.shapes import Layer


def random_experts(
    layer: ExpertsLayer,
    granularity: Granularity,
    *,
    asymmetric: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertWeights:
    """Codes and scales as those of :func:`marlinq.operations.bench.peers.random_weight`."""
    return ExpertWeights(
        _product(layer.experts, 2 * layer.inner, layer.hidden, granularity, asymmetric, dtype, device),
        _product(layer.experts, layer.hidden, layer.inner, granularity, asymmetric, dtype, device),
        granularity,
        INT4,
    )


def _product(
    experts: int,
    n: int,
    k: int,
    granularity: Granularity,
    asymmetric: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> StoredExperts:
    # Experts one below the other are a single weight of E * K channels; only scales of whole channels aren't.
    channels = granularity.channels_per_group(k)
    made = random_weight(
        Layer("experts", n, experts * k),
        Granularity.group(channels),
        asymmetric=asymmetric,
        dtype=dtype,
        device=device,
        weight_format=INT4,
    )
    scales = (made.scales * experts**0.5).view(experts, k // channels, n)
    zeros = None if made.zeros is None else made.zeros.view(experts, k // channels, n)
    return StoredExperts(made.words.view(experts, k // 16, 2 * n), scales, zeros)
