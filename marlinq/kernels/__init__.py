"""CUDA C++ sources, their run-time compilation, the choice of kernels, torch operators and CPU references."""

from __future__ import annotations

import torch

from marlinq.kernels.choose.decision import KernelDecision, decide
from marlinq.kernels.contract.demands import (
    batch_invariant,
    dependent_launches,
    early_launches,
    forced_kernel,
)
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.problem import GRANULARITIES, GROUP_SIZES, Problem
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.kernels.driver.compiler import ARCHITECTURES, compile_kernel
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.launch.precompile import LayerShape, precompile, precompile_model
from marlinq.kernels.ops.gemm_reference import reference_gemm
from marlinq.kernels.ops.operators import GEMMS, w4a16_gemm
from marlinq.kernels.variants import KERNELS


def explain(device: torch.device, problem: Problem) -> KernelDecision:
    """Which kernel multiplies ``problem`` on ``device``, and why; ``reference`` where no CUDA kernel runs."""
    if device.type != "cuda":
        return KernelDecision(
            "reference", f"device {device.type} has no CUDA kernels; torch arithmetic runs instead"
        )
    # torch annotates index as int, but that of torch.device("cuda") is None.
    index = torch.cuda.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    return decide(problem, device_numbers(index))


__all__ = [
    "ARCHITECTURES",
    "GEMMS",
    "GRANULARITIES",
    "GROUP_SIZES",
    "KERNELS",
    "Device",
    "KernelDecision",
    "LayerShape",
    "Operand",
    "Problem",
    "WeightFormat",
    "batch_invariant",
    "compile_kernel",
    "decide",
    "dependent_launches",
    "device_numbers",
    "early_launches",
    "explain",
    "forced_kernel",
    "precompile",
    "precompile_model",
    "reference_gemm",
    "w4a16_gemm",
]
