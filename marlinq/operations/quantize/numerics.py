"""The dtypes that a run computes in, and the facts about the machine that can change bits of its result."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from marlinq.checkpoint import Checkpoint
from marlinq.core.devices import multiplies_bfloat16
from marlinq.core.dtypes import dtype_name, torch_dtype
from marlinq.core.version import __version__
from marlinq.models import Blueprint
from marlinq.operations.quantize.planning import OutputPlan

_FLOAT32_WORK = 6e14
"""operations of forward passes up to which a GPU computes in float32: 15 seconds of an H200"""
_QUICK_SHARE = 0.25
"""share of ``_FLOAT32_WORK`` for methods that are not sequential, which are chosen for their speed"""
_CPU_FLOAT32_WORK = 1e12
"""operations of forward passes up to which a CPU multiplies in float32: ten seconds of two cores"""


def compute_dtype(checkpoint: Checkpoint, plan: OutputPlan, device: torch.device, tokens: int) -> torch.dtype:
    """The dtype that blocks run in on ``tokens`` tokens of calibration text.

    On a CPU float32, because operations other than products are slow in 16 bits there. On a GPU float32 as
    long as that takes seconds, so that GPU and CPU agree; a larger model runs in the checkpoint's dtype.
    """
    share = 1.0 if plan.method.sequential else _QUICK_SHARE
    if device.type == "cpu" or _forward_work(plan, tokens) <= share * _FLOAT32_WORK:
        return torch.float32
    first = next(iter(plan.modules.values()))
    return torch_dtype(checkpoint.tensors[first.source].dtype)


def compute_products(
    plan: OutputPlan, blueprint: Blueprint, device: torch.device, tokens: int
) -> torch.dtype | None:
    """The dtype that linear layers multiply in while blocks run in float32; None for float32.

    bfloat16 on a CPU that has instructions for it, unless float32 takes seconds only. Never in a model with
    experts, because rounding would route some tokens to other experts.
    """
    if _forward_work(plan, tokens) <= _CPU_FLOAT32_WORK or blueprint.routed:
        return None
    return torch.bfloat16 if multiplies_bfloat16(device) else None


def described_dtype(dtype: torch.dtype, products: torch.dtype | None) -> str:
    """``float32``, or ``float32 with products in bfloat16``."""
    return dtype_name(dtype) + ("" if products is None else f" with products in {dtype_name(products)}")


def environment_of(device: torch.device, dtype: torch.dtype, products: torch.dtype | None) -> dict[str, Any]:
    """Versions, device, dtypes and threads: everything besides recipe and model that can change a bit of the
    result."""
    return {
        "marlinq": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": described_dtype(dtype, products),
        "threads": torch.get_num_threads(),
    }


def _forward_work(plan: OutputPlan, tokens: int) -> int:
    """Operations of two forward passes: a multiplication and an addition for each weight and token."""
    projections = [planned.projection for planned in plan.modules.values()]
    return 4 * tokens * sum(each.in_features * each.out_features for each in projections)
