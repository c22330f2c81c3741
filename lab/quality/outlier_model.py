"""Writes a checkpoint that computes the same as another one and is harder to quantise.

    python lab/quality/outlier_model.py MODEL OUT [--seed N]

Scales by powers of two, so every weight keeps its bits but for the exponent: channels between a norm and the
linears that read it, between v_proj and o_proj, and between up_proj and down_proj. One channel in 64 is
scaled by 8, 16 or 32, the others by 1/2, 1 or 2. For Llama-like models without sandwich norms.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig


def factors(channels: int, generator: torch.Generator) -> Tensor:
    """float32 [channels], powers of two: few large ones among small ones."""
    exponents = torch.randint(-1, 2, (channels,), generator=generator)
    large = torch.randperm(channels, generator=generator)[: channels // 64]
    exponents[large] = torch.randint(3, 6, (len(large),), generator=generator)
    return torch.exp2(exponents.float())


def rescale(tensors: dict[str, Tensor], config: object, generator: torch.Generator) -> None:
    """Scales ``tensors``, the state of a Llama-like model, in place."""

    def rows(name: str, by: Tensor) -> None:
        for kind in ("weight", "bias"):
            if (tensor := tensors.get(f"{name}.{kind}")) is not None:
                scale = by.reshape(-1, *[1] * (tensor.dim() - 1))
                tensors[f"{name}.{kind}"] = (tensor.float() * scale).to(tensor.dtype)

    def columns(name: str, by: Tensor) -> None:
        tensor = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = (tensor.float() * by).to(tensor.dtype)

    width, inner = config.hidden_size, config.intermediate_size  # type: ignore[attr-defined]
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads  # type: ignore[attr-defined]
    head_dim = getattr(config, "head_dim", None) or width // heads
    for block in range(config.num_hidden_layers):  # type: ignore[attr-defined]
        name = f"model.layers.{block}"
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            by = factors(width, generator)
            rows(f"{name}.{norm}", 1 / by)
            for reader in readers:
                columns(f"{name}.{reader}", by)
        by = factors(key_heads * head_dim, generator)
        rows(f"{name}.self_attn.v_proj", 1 / by)
        shared = by.reshape(key_heads, 1, head_dim).expand(-1, heads // key_heads, -1).reshape(-1)
        columns(f"{name}.self_attn.o_proj", shared)
        by = factors(inner, generator)
        rows(f"{name}.mlp.up_proj", 1 / by)
        columns(f"{name}.mlp.down_proj", by)


def main() -> None:
    """Read, scale, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shutil.copytree(options.model, options.out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {
        name: tensor
        for file in options.model.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    config = AutoConfig.from_pretrained(options.model)
    rescale(tensors, config, torch.Generator().manual_seed(options.seed))
    save_file(tensors, options.out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
