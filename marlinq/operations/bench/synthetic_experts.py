"""Random experts in the kernels' layout, made on the device that will run them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.kernels.experts import ExpertWeights, StoredExperts
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.shapes import LinearSize
from marlinq.operations.bench.weights import random_weight


def random_experts(
    layer: ExpertsLayer,
    granularity: Granularity,
    *,
    asymmetric: bool,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat,
    scale_dtype: torch.dtype | None = None,
) -> ExpertWeights:
    """Random experts with codes and scales as in :func:`marlinq.operations.bench.weights.random_weight`."""
    kind = weight_format, granularity, asymmetric, dtype, device, scale_dtype
    return ExpertWeights(
        _product(layer.experts, 2 * layer.inner, layer.hidden, *kind),
        _product(layer.experts, layer.hidden, layer.inner, *kind),
    )


def _product(
    experts: int,
    n: int,
    k: int,
    weight_format: WeightFormat,
    granularity: Granularity,
    asymmetric: bool,
    dtype: torch.dtype,
    device: torch.device,
    scale_dtype: torch.dtype | None,
) -> StoredExperts:
    # Experts concatenated along K are one weight of E * K channels, unless a scale covers a whole channel.
    channels = granularity.channels_per_group(k)
    made = random_weight(
        LinearSize("experts", n, experts * k),
        Granularity.group(channels),
        asymmetric=asymmetric,
        dtype=dtype,
        device=device,
        weight_format=weight_format,
        scale_dtype=scale_dtype,
    )
    # Made for E times the channels, scales are too small by the root of E; the nearest power of two keeps
    # them exact.
    scales = (made.scales * 2.0 ** round(math.log2(experts) / 2)).view(experts, k // channels, n)
    zeros = None if made.zeros is None else made.zeros.view(experts, k // channels, n)
    words = made.words.view(experts, k // weight_format.row_channels, n * weight_format.row_words)
    return StoredExperts(weight_format, granularity, words, scales, zeros)


def gate_then_up(layer: ExpertsLayer, weights: ExpertWeights) -> Tensor:
    """Indices of the stored columns (alternating blocks of 16 of gate and up) in the order gate, then up."""
    blocks = torch.arange(2 * layer.inner, device=weights.down.words.device).view(-1, 2, 16)
    return blocks.transpose(0, 1).reshape(-1)
