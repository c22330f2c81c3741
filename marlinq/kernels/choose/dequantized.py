"""What a product costs whose weight is dequantised once and multiplied by cuBLAS."""

from __future__ import annotations

from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import Problem

# 16-bit multiplications of a multiprocessor's tensor cores a cycle, by ten times the compute capability, as
# NVIDIA's data sheets give them for float32 sums.
_MULTIPLICATIONS = {80: 1024, 86: 512, 87: 512, 89: 512, 90: 2048, 100: 4096, 103: 4096, 120: 512, 121: 512}
# The share of them that cuBLAS is taken to reach, and seconds of one of its launches or torch's.
_REACHED = 0.75
LAUNCH_SECONDS = 3e-6
_DEQUANTIZING_LAUNCHES = 8
# Nobody has measured where the crossover is, so it has to be clear.
MARGIN = 0.9


def rate(device: Device) -> float:
    """16-bit multiplications a second that cuBLAS is taken to reach."""
    return _MULTIPLICATIONS.get(device.capability, 512) * _REACHED * device.multiprocessors * device.clock


def estimate(problem: Problem, device: Device) -> float:
    """Seconds of dequantising and of the product."""
    weights = problem.n * problem.k
    dequantizing = weights * (problem.format.dequantizing_bytes + problem.scale_bytes_per_weight)
    operands = 2 * (weights + problem.m * (problem.n + problem.k))
    product = max(problem.m * weights / rate(device), operands / device.bandwidth)
    return LAUNCH_SECONDS * (_DEQUANTIZING_LAUNCHES + 1) + dequantizing / device.bandwidth + product
