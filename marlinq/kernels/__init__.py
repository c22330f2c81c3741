"""CUDA C++ sources, their run-time compilation, tile decisions and the torch op with its CPU reference."""

from __future__ import annotations

import torch

from marlinq.kernels.compiler import ARCHITECTURES, cache_folder, compile_kernel
from marlinq.kernels.decision import GROUP_SIZES, Device, KernelDecision, Problem, StreamConfig, decide
from marlinq.kernels.launch import dependent_launches, precompile
from marlinq.kernels.op import w4a16_gemm
from marlinq.kernels.reference import dequantize_operands, reference_gemm


def explain(
    device: torch.device, dtype: torch.dtype, m: int, n: int, k: int, group_size: int, asymmetric: bool
) -> KernelDecision:
    """The decision for one problem on ``device``, with its reason."""
    if device.type != "cuda":
        return KernelDecision(
            "reference", f"device {device.type} has no CUDA kernels; torch arithmetic runs instead"
        )
    from marlinq.kernels.launch import device_numbers

    index = torch.cuda.current_device() if device.index is None else device.index
    return decide(Problem(m, n, k, group_size, asymmetric, dtype == torch.bfloat16), device_numbers(index))


__all__ = [
    "ARCHITECTURES",
    "GROUP_SIZES",
    "Device",
    "KernelDecision",
    "Problem",
    "StreamConfig",
    "cache_folder",
    "compile_kernel",
    "decide",
    "dependent_launches",
    "dequantize_operands",
    "explain",
    "precompile",
    "reference_gemm",
    "w4a16_gemm",
]
