"""The kernels between the products of a decode step: norms, attention, activations, routers.

Each function prepares a launch from the addresses, shapes and dtypes of tensors, so it needs no GPU. It
returns a :class:`~marlinq.kernels.launch.prepared.Prepared`.
"""

from __future__ import annotations

from marlinq.kernels.launch.prepared import Prepared, bind, precompile_prepared
from marlinq.kernels.step.activate import Arrangement, activate
from marlinq.kernels.step.append import append
from marlinq.kernels.step.attend import AttentionShape, AttentionWorkspace, Division, attend, divide
from marlinq.kernels.step.convolution import ConvolutionWeights, convolution_refusal, gated_convolution
from marlinq.kernels.step.delta import DeltaWeights, RateWeights, delta, delta_refusal, makes_rates
from marlinq.kernels.step.heads import Gates, HeadNorm, HeadWork
from marlinq.kernels.step.latent import (
    LatentDivision,
    LatentWeights,
    LatentWorkspace,
    divide_latent,
    latent_attend,
    latent_queries,
    latent_refusal,
    latent_values,
)
from marlinq.kernels.step.layer_inputs import LayerInputWeights, layer_inputs, layer_inputs_refusal
from marlinq.kernels.step.mamba import MambaWeights, MambaWorkspace, mamba, mamba_refusal
from marlinq.kernels.step.residual import Gather, RoutedRows, RowNorm, residual
from marlinq.kernels.step.router import ROUTER_WIDEST, Addition, router

__all__ = [
    "ROUTER_WIDEST",
    "Addition",
    "Arrangement",
    "AttentionShape",
    "AttentionWorkspace",
    "ConvolutionWeights",
    "DeltaWeights",
    "Division",
    "Gates",
    "Gather",
    "HeadNorm",
    "HeadWork",
    "LatentDivision",
    "LatentWeights",
    "LatentWorkspace",
    "LayerInputWeights",
    "MambaWeights",
    "MambaWorkspace",
    "Prepared",
    "RateWeights",
    "RoutedRows",
    "RowNorm",
    "activate",
    "append",
    "attend",
    "bind",
    "convolution_refusal",
    "delta",
    "delta_refusal",
    "divide",
    "divide_latent",
    "gated_convolution",
    "latent_attend",
    "latent_queries",
    "latent_refusal",
    "latent_values",
    "layer_inputs",
    "layer_inputs_refusal",
    "makes_rates",
    "mamba",
    "mamba_refusal",
    "precompile_prepared",
    "residual",
    "router",
]
