"""Choose a model's device and dtype, with the reason where the dtype is not the checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from marlinq.checkpoint import Checkpoint, dtype_contradiction
from marlinq.core.devices import resolve_device
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import UsageError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Placement:
    """A model's device and dtype; ``reason`` says why the dtype differs from the checkpoint's, or is
    empty."""

    device: torch.device
    dtype: torch.dtype
    reason: str = ""


def place(
    checkpoint: Checkpoint,
    *,
    quantized: bool,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
) -> Placement:
    """Resolves ``device`` and ``dtype``.

    ``auto`` takes the dtype that the checkpoint names, with two exceptions: a CPU computes in float32, and a
    quantised float32 checkpoint runs in float16 on a GPU, whose kernel has no float32.

    Raises:
        UsageError: an unknown device or dtype.
        EnvironmentProblem: the device is not there.
    """
    chosen = resolve_device(device)
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise UsageError(f"dtype: expected float16, bfloat16 or float32, found {dtype}")
        return Placement(chosen, dtype)
    if dtype is not None and dtype != "auto":
        if dtype not in DTYPES:
            raise UsageError(f"dtype: expected auto, {', '.join(DTYPES)}, found {dtype!r}")
        return Placement(chosen, DTYPES[dtype])
    named = _named_dtype(checkpoint)
    if chosen.type == "cpu" and named != torch.float32:
        return Placement(
            chosen,
            torch.float32,
            f"float32 instead of {dtype_name(named)}: 16-bit arithmetic is slow on a CPU",
        )
    if chosen.type == "cuda" and quantized and named == torch.float32:
        return Placement(chosen, torch.float16, "float16 instead of float32: the kernel has no float32")
    contradiction = dtype_contradiction(checkpoint)
    if contradiction is not None:
        return Placement(chosen, named, f"{contradiction}; --dtype chooses another than {dtype_name(named)}")
    return Placement(chosen, named)


def _named_dtype(checkpoint: Checkpoint) -> torch.dtype:
    configs = [checkpoint.config, checkpoint.config.get("text_config")]
    for config in configs:
        if isinstance(config, dict):
            name = config.get("dtype") or config.get("torch_dtype")
            if isinstance(name, str) and name.removeprefix("torch.") in DTYPES:
                return DTYPES[name.removeprefix("torch.")]
    stored = [DTYPES[info.dtype] for info in checkpoint.tensors.values() if info.dtype in DTYPES]
    return stored[0] if stored else torch.float32
