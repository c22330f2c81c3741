"""Tiny Llama checkpoints, unquantised and quantised in any layout, made without the quantize operation."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from marlinq.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    TensorPlan,
)
from marlinq.core.dtypes import dtype_name
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats import FORMATS, LAYOUTS, spec_of
from marlinq.formats.dialects import DIALECTS, write_quantization_config
from marlinq.methods.gptq import GPTQOptions, solve_gptq
from marlinq.methods.rtn import round_to_nearest
from tests.testing.schemes import quantized, scheme

SHARD_BYTES = 50_000
"""bytes per shard, so few that every quantised checkpoint has several"""


def save_original(
    folder: Path, *, seed: int = 0, tied: bool = False, kv_heads: int = 2, layers: int = 1
) -> Path:
    """A random float32 Llama: hidden 128; verify judges the seven linears of each layer."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def hessian_of(k: int, seed: int) -> Tensor:
    """X^T X of correlated inputs whose channels differ in size, as in real layers."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    spread = torch.exp(torch.randn(k, generator=generator))
    x = (torch.randn(4 * k, k, generator=generator) @ mixing) * spread
    return x.t() @ x


def quantize(
    weight: Tensor, *, group_size: int, symmetric: bool, act_order: str, seed: int, sparse: bool = False
) -> QuantizedWeight:
    """marlinq's GPTQ. With ``act_order`` "scattered", groups follow the activation order, with a g_idx;
    "rounded" rounds to nearest instead."""
    wanted = scheme(group_size, symmetric=symmetric, sparsity=TWO_OF_FOUR if sparse else None)
    if act_order == "rounded":
        return round_to_nearest(weight, wanted)
    hessian = hessian_of(weight.shape[1], seed)
    if act_order != "scattered":
        return solve_gptq(weight, hessian, wanted, GPTQOptions(act_order=act_order))[0]
    order = hessian.diagonal().argsort(descending=True)
    q, _ = solve_gptq(weight[:, order], hessian[order][:, order], wanted, GPTQOptions(act_order="none"))
    back = order.argsort()
    g_idx = trivial_g_idx(weight.shape[1], group_size)[back]
    return quantized(q.codes[back].contiguous(), q.scales, q.zeros, g_idx, q.channels_per_group)


@cache
def _solved(
    source: Path, name: str, group_size: int, symmetric: bool, act_order: str, seed: int, sparse: bool
) -> QuantizedWeight:
    """The quantised weights of an original, cached for all layouts, since its folder never changes."""
    weight = Checkpoint.open(source).tensor(name).float()
    return quantize(
        weight, group_size=group_size, symmetric=symmetric, act_order=act_order, seed=seed, sparse=sparse
    )


def save_quantized(
    source: Path,
    out: Path,
    layout_name: str,
    *,
    group_size: int = 32,
    symmetric: bool = True,
    act_order: str = "none",
    skip: tuple[str, ...] = (),
    say_skipped: bool = True,
    dtype: torch.dtype = torch.float16,
    sparse: bool = False,
) -> Path:
    """Writes a checkpoint with all linears of the blocks quantised except ``skip``; with ``say_skipped`` the
    config names the skipped ones."""
    checkpoint = Checkpoint.open(source)
    layout = LAYOUTS[layout_name]
    tensors: dict[str, Tensor] = {}
    modules, plain = {}, ["lm_head"]
    for index, name in enumerate(sorted(checkpoint.tensors)):
        module = name.removesuffix(".weight")
        weight = checkpoint.tensor(name)
        if not name.endswith("_proj.weight") or module in skip:
            tensors[name] = weight.to(dtype)
            plain += [module] if module in skip and say_skipped else []
            continue
        q = _solved(source, name, group_size, symmetric, act_order, index, sparse)
        packed = layout.pack(q)
        modules[module] = spec_of(q)
        tensors.update({f"{module}.{suffix}": tensor for suffix, tensor in packed.items()})
    settings = write_quantization_config(FORMATS[layout_name], modules, plain)
    if act_order == "scattered":
        settings["desc_act"] = True
    config = {**json.loads((source / "config.json").read_text()), "quantization_config": settings}
    plan = [
        TensorPlan(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    with CheckpointWriter(out, plan, fingerprint="test", max_shard_bytes=SHARD_BYTES) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish(
            config=config,
            manifest={"version": "test"},
            side_files_from=checkpoint,
            extra_json=DIALECTS[FORMATS[layout_name].dialect].extra_files(settings),
        )
    return out
