"""Rows from which a product also quantises its activations to FP8: of FP8 weights, or of INT4 where asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from marlinq.core.float_elements import E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations
from marlinq.kernels.choose import dequantized_estimate
from marlinq.kernels.choose.decision import decide
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.variants import warpgroup_fp8

_ROWS = (256, 512, 1024, 2048, 4096)
# Measured on an H200 (lab/kernels/eight_bits.py): seconds of launch overhead; share of the memory bandwidth
# reached.
_BESIDE, _MOVES = 1.5e-5, 0.82
# cuBLAS's FP8 rate over its assumed 16-bit rate, by whether scales belong to groups. Measured on an H200.
_MULTIPLE = {False: 1.95, True: 1.40}
# FP8 activations are used below this share of the 16-bit product's estimate: both estimates are a few per
# cent off.
_MARGIN = 0.95
_ADA, _HOPPER = 89, 90
_GROUP = 128
BESIDE_INT4 = Activations(E4M3, Granularity.channel(), dynamic=True)
"""FP8 activations of INT4 weights, a scale a token: those that callers ask for."""
# Rows from which INT4 weights take them, where asked; measured on an H200.
_LEAST_INT4 = 1024


@dataclass(frozen=True)
class EightBitDecision:
    """Whether activations are quantised to FP8.

    Attributes:
        least_rows: rows of the smallest batch whose activations are quantised; None for never.
        reason: one clause of text.
    """

    least_rows: int | None
    reason: str


def estimate(problem: Problem, device: Device) -> float:
    """Seconds to quantise activations, to order the weight's bytes for cuBLAS, and to multiply."""
    weights, m = problem.n * problem.k, problem.m
    moved = 2 * weights + 3 * m * problem.k
    operands = weights + m * (problem.k + 2 * problem.n)
    rate = _MULTIPLE[problem.granularity.for_channels(problem.k).channels > 0] * dequantized_estimate.rate(
        device
    )
    product = max(m * weights / rate, operands / device.bandwidth)
    return _BESIDE + moved / (_MOVES * device.bandwidth) + product


def refusal(problem: Problem, activations: Activations | None, device: Device) -> str | None:
    """Why the product can't use the FP8 activations that the checkpoint names, in one clause; None if it
    can."""
    if activations is None:
        return "the checkpoint wants 16-bit activations"
    if problem.format == INT4 and activations == BESIDE_INT4:
        return warpgroup_fp8.refusal(problem, device)
    if activations.element != E4M3 or problem.format.name != E4M3.name:
        return f"{problem.format.name} weights with {activations.describe()}"
    if device.capability < _ADA:
        return f"{device.architecture} has no FP8 products: activations stay in 16 bits"
    if not problem.bfloat16:
        return "activations in float16 stay as they are; FP8 products give bfloat16"
    kind, channels = activations.granularity.kind, problem.granularity.for_channels(problem.k).channels
    if channels:
        if not hasattr(torch.nn.functional, "scaled_mm"):
            return f"torch {torch.__version__} has no product of scales by group"
        if (channels, kind, activations.granularity.channels) != (_GROUP, "group", _GROUP):
            return f"{problem.granularity.describe()} with {activations.describe()}"
        if device.capability != _HOPPER:
            return f"cuBLAS has no product of scales by group for {device.architecture}"
        return None
    if kind == "group":
        return f"{problem.granularity.describe()} with {activations.describe()}"
    return None


def decide_eight_bits(problem: Problem, activations: Activations | None, device: Device) -> EightBitDecision:
    """The decision for a weight: the smallest batch for which FP8 activations are estimated to be faster.

    ``problem.m`` is ignored.
    """
    reason = refusal(problem, activations, device)
    if reason is not None:
        return EightBitDecision(None, reason)
    if problem.format == INT4:
        return EightBitDecision(_LEAST_INT4, f"FP8 activations from {_LEAST_INT4} rows on")
    least, gain = None, 0.0
    for rows in reversed(_ROWS):
        batch = replace(problem, m=rows)
        ratio = decide(batch, device).seconds / estimate(batch, device)
        if ratio * _MARGIN < 1:
            break
        least, gain = rows, max(gain, ratio)
    if least is None:
        return EightBitDecision(None, f"FP8 activations are not expected to be faster at {_ROWS[-1]} rows")
    return EightBitDecision(least, f"FP8 activations from {least} rows on, up to {gain:.1f} times as fast")
