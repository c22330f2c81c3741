"""Comparing small checkpoints of one file, and what models compute."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor of a checkpoint by name."""
    return load_file(folder / "model.safetensors")


def assert_same_bytes(folder: Path, other: Path) -> None:
    """Both checkpoints hold the same tensors, bit for bit."""
    before, after = tensors_of(folder), tensors_of(other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


def logits(model: torch.nn.Module) -> Tensor:
    """Logits [1, 24, vocabulary] of a fixed text."""
    with torch.no_grad():
        found: Tensor = model(torch.arange(3, 27)[None]).logits
    return found
