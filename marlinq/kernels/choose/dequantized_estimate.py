"""Estimated seconds of a product whose weight is dequantised once and multiplied by cuBLAS."""

from __future__ import annotations

from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import Problem

# 16-bit multiply-adds a cycle of a multiprocessor's tensor cores with float32 sums, from NVIDIA's data
# sheets. Keys: ten times the compute capability.
_MULTIPLICATIONS = {80: 1024, 86: 512, 87: 512, 89: 512, 90: 2048, 100: 4096, 103: 4096, 120: 512, 121: 512}
# Assumed: share of that peak that cuBLAS reaches; seconds of a launch; launches that dequantise a weight.
_REACHED = 0.75
LAUNCH_SECONDS = 3e-6
_DEQUANTIZING_LAUNCHES = 8
# Dequantising is chosen below this share of the fastest kernel's estimate; the crossover was not measured.
MARGIN = 0.9


def rate(device: Device) -> float:
    """16-bit multiply-adds a second that cuBLAS is assumed to reach."""
    return _MULTIPLICATIONS.get(device.capability, 512) * _REACHED * device.multiprocessors * device.clock


def estimate(problem: Problem, device: Device) -> float:
    """Seconds to dequantise the weight and to multiply."""
    weights = problem.n * problem.k
    dequantizing = weights * (problem.format.dequantizing_bytes + problem.scale_bytes_per_weight)
    operands = 2 * (weights + problem.m * (problem.n + problem.k))
    product = max(problem.m * weights / rate(device), operands / device.bandwidth)
    return LAUNCH_SECONDS * (_DEQUANTIZING_LAUNCHES + 1) + dequantizing / device.bandwidth + product
