"""Checkpoints of ours as other programs store the same weights: other names, other dtypes, other meanings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marlinq.checkpoint import MANIFEST, Checkpoint, QuantizedCheckpoint
from marlinq.core.float_elements import E2M1
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations
from marlinq.formats.dialects import write_quantization_config

Tensors = dict[str, Tensor]


def config_of(folder: Path) -> dict[str, Any]:
    """The ``quantization_config`` of a folder."""
    stored: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return stored


def rewrite(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Replaces the ``quantization_config`` and all tensors; the manifest and other configs leave."""
    for name in (MANIFEST, "hf_quant_config.json"):
        (folder / name).unlink(missing_ok=True)
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": dict(config)}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def dense_linears(folder: Path) -> tuple[str, ...]:
    """Names of a folder's linears that are not quantised."""
    view = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert view is not None
    names = (name.removesuffix(".weight") for name in view.passthrough)
    return tuple(name for name in names if name.endswith(("_proj", "lm_head")))


def as_gptqmodel(folder: Path) -> None:
    """The same weights with scales that divide."""
    tensors = load_file(folder / "model.safetensors")
    skipped = {"dynamic": {f"-:{name}": {} for name in dense_linears(folder)}}
    for name in list(tensors):
        stem, _, suffix = name.rpartition(".")
        if suffix in ("weight_scale", "weight_scale_inv"):
            inverse = tensors.pop(name).float().reciprocal()
            tensors[f"{stem}.weight_scale_inv"] = inverse.flatten() if inverse.shape[1] == 1 else inverse
    blocks = config_of(folder).get("weight_block_size")
    size = {"weight_block_size": blocks} if blocks else {"weight_scale_method": "row"}
    rewrite(folder, {"quant_method": "fp8", "weight_scale_semantics": "inverse", **size, **skipped}, tensors)


def with_four_bit_inputs(folder: Path) -> None:
    """The same NVFP4 weights for activations of 4 bits, with a scale each."""
    view = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert view is not None
    inputs = Activations(E2M1, Granularity.group(16), dynamic=False)
    specs = {
        name: replace(spec, scheme=replace(spec.scheme, activations=inputs))
        for name, spec in view.modules.items()
    }
    tensors, dense = load_file(folder / "model.safetensors"), dense_linears(folder)
    divides = view.format.name == "compressed-tensors"
    for name in specs:
        own = (
            {"input_global_scale": torch.tensor([300.0])} if divides else {"input_scale": torch.tensor(0.003)}
        )
        tensors |= {f"{name}.{suffix}": scale for suffix, scale in own.items()}
    rewrite(folder, write_quantization_config(view.format, specs, dense), tensors)


def with_weights_alone(folder: Path) -> None:
    """compressed-tensors' ``naive-quantized``: FP8 weights for activations of 16 bits."""
    config = config_of(folder)
    for group in config["config_groups"].values():
        group["input_activations"], group["format"] = None, "naive-quantized"
    rewrite(folder, {**config, "format": "naive-quantized"}, load_file(folder / "model.safetensors"))


def with_scales_called(folder: Path, names: Mapping[str, str], dtype: torch.dtype = torch.float32) -> None:
    """Hugging Face ``fp8`` with other suffixes, old -> new, and scales of another dtype, which holds them."""
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        stored = tensor
        if suffix == "weight_scale_inv":
            stored = tensor.to(dtype)
            assert torch.equal(stored.float(), tensor), "the dtype does not hold these scales"
        tensors[f"{stem}.{names.get(suffix, suffix)}"] = stored
    rewrite(folder, config_of(folder), tensors)


def as_auto_round(folder: Path, eight_bits: str) -> None:
    """GPTQ weights in AutoRound's dialect, whose ``extra_config`` names the module of 8 bits."""
    config = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "extra_config": {eight_bits: {"bits": 8}, "lm_head": {"bits": 16}},
    }
    (folder / "quantize_config.json").unlink(missing_ok=True)
    rewrite(folder, config, load_file(folder / "model.safetensors"))
