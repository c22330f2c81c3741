"""From how many rows on a product of FP8 weights takes FP8 activations, and why not at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from marlinq.core.float_elements import E4M3
from marlinq.core.scheme import Activations
from marlinq.kernels.choose import dequantized
from marlinq.kernels.choose.decision import decide
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import Problem

_ROWS = (256, 512, 1024, 2048, 4096)
# Measured on an H200 (lab/kernels/eight_bits.py): seconds of the launches beside the three that move and
# multiply; the share of the bandwidth that moves bytes; what cuBLAS multiplies a second, as a multiple of
# what it is taken to reach with 16 bits, with scales of rows and of groups.
_BESIDE, _MOVES = 1.5e-5, 0.82
_MULTIPLE = {False: 1.95, True: 1.40}
# How much faster it has to be expected to be: estimates of either side are some per cent off.
_MARGIN = 0.95
_ADA, _HOPPER = 89, 90
_GROUP = 128


@dataclass(frozen=True)
class EightBitDecision:
    """Whether activations are quantised, too.

    Attributes:
        least_rows: rows of a batch from which on they are; None for never.
        reason: one clause, for people.
    """

    least_rows: int | None
    reason: str


def estimate(problem: Problem, device: Device) -> float:
    """Seconds of quantising activations, of ordering the weight's bytes for cuBLAS, and of the product."""
    weights, m = problem.n * problem.k, problem.m
    moved = 2 * weights + 3 * m * problem.k
    operands = weights + m * (problem.k + 2 * problem.n)
    rate = _MULTIPLE[problem.granularity.for_channels(problem.k).channels > 0] * dequantized.rate(device)
    product = max(m * weights / rate, operands / device.bandwidth)
    return _BESIDE + moved / (_MOVES * device.bandwidth) + product


def refusal(problem: Problem, activations: Activations | None, device: Device) -> str | None:
    """Why the product can't take FP8 activations as the checkpoint wants them, in one clause, or None."""
    if activations is None:
        return "the checkpoint wants 16-bit activations"
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
    """For a weight, whatever ``problem.m``: from the batch on from which FP8 activations are expected to
    be faster, beyond the models' doubt."""
    reason = refusal(problem, activations, device)
    if reason is not None:
        return EightBitDecision(None, reason)
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
