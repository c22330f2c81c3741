"""Draft heads for tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYOUTS = ("mtp", "layer")
"""Spellings: ``mtp.fc`` and so on, or ``enorm`` and so on in a layer behind the model's last."""


def add_draft_head(folder: Path, block: int, layout: str, *, seed: int = 0, copies: bool = False) -> None:
    """Adds a head to the checkpoint in ``folder`` whose block is like the model's block ``block``.

    Args:
        folder: a checkpoint of one file with names like ``model.layers.0``.
        block: number of the block whose tensors it copies.
        layout: one of :data:`LAYOUTS`.
        seed: seed of the projection and of noise on norms.
        copies: whether the projection passes the embedding on and the block adds nothing, so that the head
            predicts as a model whose blocks add nothing (if norms multiply by their weights as stored).
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    blocks = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    prefix = "mtp." if layout == "mtp" else f"model.layers.{max(blocks) + 1}."
    generator = torch.Generator().manual_seed(seed)
    norm = tensors["model.norm.weight"]
    hidden = norm.shape[0]

    def near(value: Tensor) -> Tensor:
        noise = 0.0 if copies else 0.1
        return value + noise * torch.randn(value.shape, generator=generator).to(value.dtype)

    source = f"model.layers.{block}."
    inner = "layers.0." if layout == "mtp" else ""
    for name in [name for name in tensors if name.startswith(source)]:
        last = copies and name.endswith(("o_proj.weight", "down_proj.weight"))
        value = torch.zeros_like(tensors[name]) if last else tensors[name].clone()
        tensors[prefix + inner + name.removeprefix(source)] = value
    names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    if layout == "layer":
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    projection = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
    if copies:
        projection = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    tensors[f"{prefix}{names[0]}.weight"] = projection.to(norm.dtype)
    for name in names[1:]:
        tensors[f"{prefix}{name}.weight"] = near(norm)
    if copies:
        # The last norm multiplies by its weight once.
        tensors[f"{prefix}{names[1]}.weight"] = torch.ones_like(norm)
    save_file(tensors, path)
