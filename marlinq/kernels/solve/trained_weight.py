"""Dequantise weights with trained codes and scales, and their gradients (``cuda/solve/tuned_weight.cuh``).

A latent code is a float32 that is rounded to a code; gradients pass through the rounding unchanged
(straight-through estimator).
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.solve.panel import SCALES, PreparedPanel

# Output channels of a block: of the kernel that makes weights, and of the kernel that makes gradients. Input
# channels, at most, of a block that makes weights.
_WIDE, _NARROW, _ROWS = 128, 32, 16
_WEIGHTS = {torch.float32: "Single", torch.bfloat16: "Bfloat16"}


class TunedTensors(NamedTuple):
    """Codes and scales of a weight in training; all tensors are contiguous.

    Attributes:
        given: [K, N], float32 latent codes in training, or fixed uint8 codes.
        change: float32 [groups, N], relative change of each scale, in training.
        scales: float32 [groups, N], scales before the change.
        zeros: zero points float32 [groups, N].
        dtype: dtype to which changed scales are rounded.
        top: largest code.
        reach: code units beyond 0 and ``top`` within which a latent code still has a gradient.
    """

    given: Tensor
    change: Tensor
    scales: Tensor
    zeros: Tensor
    dtype: torch.dtype
    top: int
    reach: float

    @property
    def latent(self) -> bool:
        """Whether codes are trained."""
        return self.given.dtype == torch.float32


class WeightArguments(ctypes.Structure):
    """The parameters of the kernel that makes a weight."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("given", "change", "scales", "zeros", "out")),
        *((name, ctypes.c_int) for name in ("n", "group", "rows")),
        *((name, ctypes.c_float) for name in ("top", "reach")),
    )


class GradientArguments(ctypes.Structure):
    """The parameters of the kernel that makes the gradients."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("given", "change", "scales", "zeros")),
        *((name, ctypes.c_void_p) for name in ("d_weight", "by_change", "by_latent")),
        *((name, ctypes.c_int) for name in ("n", "group")),
        *((name, ctypes.c_float) for name in ("top", "reach")),
    )


def prepare_weight(tensors: TunedTensors, out: Tensor) -> PreparedPanel:
    """The launch that dequantises a weight.

    Args:
        tensors: codes and scales.
        out: float32 or bfloat16 [K, N], contiguous; written.

    Raises:
        ValueError: a tensor has another shape or dtype than the kernel reads, or is not contiguous.
    """
    group = _check(tensors, out=out)
    k, n = out.shape
    rows = math.gcd(group, _ROWS)
    arguments = WeightArguments(
        *(tensor.data_ptr() for tensor in (*tensors[:4], out)), n, group, rows, tensors.top, tensors.reach
    )
    return PreparedPanel(
        instantiation("tuned_weight", tensors, out.dtype), k // rows * -(-n // _WIDE), 0, arguments
    )


def prepare_gradients(
    tensors: TunedTensors, d_weight: Tensor, by_change: Tensor, by_latent: Tensor | None
) -> PreparedPanel:
    """The launch that computes the gradients of codes and scales.

    Args:
        tensors: codes and scales.
        d_weight: float32 or bfloat16 [K, N], contiguous: gradient with respect to the weight.
        by_change: float32 [groups, N], contiguous; written: gradient with respect to ``change``.
        by_latent: float32 [K, N], contiguous; written: gradient with respect to latent codes. None where
            codes are fixed.

    Raises:
        ValueError: a tensor has another shape or dtype than the kernel reads, or is not contiguous.
    """
    named = (
        {"by_change": by_change} if by_latent is None else {"by_change": by_change, "by_latent": by_latent}
    )
    group = _check(tensors, d_weight=d_weight, **named)
    if (by_latent is None) == tensors.latent:
        raise ValueError("by_latent: latent codes have a gradient, codes that stay have none")
    arguments = GradientArguments(
        *(tensor.data_ptr() for tensor in (*tensors[:4], d_weight, by_change)),
        0 if by_latent is None else by_latent.data_ptr(),
        d_weight.shape[1],
        group,
        tensors.top,
        tensors.reach,
    )
    groups, n = by_change.shape
    return PreparedPanel(
        instantiation("tuned_gradients", tensors, d_weight.dtype), groups * -(-n // _NARROW), 0, arguments
    )


def instantiation(function: str, tensors: TunedTensors, weight: torch.dtype) -> Instantiation:
    """One of the two kernels, for the dtypes of its tensors."""
    parameters = (
        ("Scale", SCALES[str(tensors.dtype).removeprefix("torch.")]),
        ("Weight", _WEIGHTS[weight]),
        ("LATENT", tensors.latent),
    )
    return Instantiation("solve/tuned_weight.cuh", function, parameters)


def _check(tensors: TunedTensors, **others: Tensor) -> int:
    """Check shapes, dtypes and strides; returns the input channels of a group."""
    k, n = tensors.given.shape
    groups = tensors.scales.shape[0]
    if k % groups:
        raise ValueError(f"{k} input channels are no multiple of {groups} groups")
    wide = {"given": (torch.float32, torch.uint8), "out": tuple(_WEIGHTS), "d_weight": tuple(_WEIGHTS)}
    wide["by_latent"] = (torch.float32,)
    for name, tensor in {**dict(zip(tensors._fields[:4], tensors[:4], strict=True)), **others}.items():
        shape, dtypes = ((k, n), wide[name]) if name in wide else ((groups, n), (torch.float32,))
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous {list(shape)} of {' or '.join(map(str, dtypes))}, "
                f"found {list(tensor.shape)} of {tensor.dtype}"
            )
    return k // groups
