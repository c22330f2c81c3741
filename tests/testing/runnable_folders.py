"""Tiny checkpoints on disk, quantised and unquantised, and a tokenizer for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from marlinq.core.dtypes import dtype_name
from marlinq.core.scheme import integer_element
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats import FORMATS, StoredWeight, spec_of
from marlinq.formats.dialects import write_quantization_config
from marlinq.models import describe
from tests.testing.layouts import INTEGERS
from tests.testing.schemes import quantized

Quantizer = Callable[[str, Tensor], QuantizedWeight | None]


def random_tuple(
    k: int,
    n: int,
    *,
    group_size: int,
    seed: int = 0,
    symmetric: bool = True,
    bits: int = 4,
    scale_dtype: torch.dtype = torch.float16,
    act_order: bool = False,
) -> QuantizedWeight:
    """A random weight of any shape, with scales of both signs and dense values around 0.1."""
    generator = torch.Generator().manual_seed(seed)
    size = min(k if group_size == -1 else group_size, k)
    groups = -(-k // size)
    middle = 1 << (bits - 1)
    codes = torch.randint(0, 1 << bits, (k, n), generator=generator, dtype=torch.uint8)
    scales = (0.3 + torch.rand(groups, n, generator=generator)) * 0.3 / middle
    scales = scales * (torch.randint(0, 2, (groups, n), generator=generator) * 2 - 1)
    zeros = torch.full((groups, n), middle, dtype=torch.uint8)
    if not symmetric:
        zeros = torch.randint(1, 1 << bits, (groups, n), generator=generator, dtype=torch.uint8)
    g_idx = trivial_g_idx(k, size)
    if act_order:
        g_idx = g_idx[torch.randperm(k, generator=generator)]
    return quantized(codes, scales.to(scale_dtype), zeros, g_idx, size, integer_element(bits))


def stored_weight(q: QuantizedWeight, layout: str = "gptq-v2") -> StoredWeight:
    """``q`` as stored by a module of ``layout``."""
    packer = INTEGERS[layout]
    tensors = packer.pack(q)
    scale_dtype = dtype_name(tensors[packer.scale_key].dtype)
    scheme = replace(packer.as_stored(q.scheme), scale_dtype=scale_dtype)
    return StoredWeight(layout, packer, replace(spec_of(q), scheme=scheme), tensors)


def random_quantizer(
    *, group_size: int = 32, symmetric: bool = True, bits: int = 4, act_order: bool = False
) -> Quantizer:
    """A quantizer that gives each linear random codes, because loaders don't need the original's values."""
    count = 0

    def quantize(name: str, weight: Tensor) -> QuantizedWeight:
        nonlocal count
        count += 1
        n, k = weight.shape
        return random_tuple(
            k, n, group_size=group_size, seed=count, symmetric=symmetric, bits=bits, act_order=act_order
        )

    return quantize


def save_plain(folder: Path, model: PreTrainedModel, *, prefix: str = "") -> Path:
    """Writes ``model`` as an ordinary checkpoint, with ``prefix`` removed from all tensor names."""
    return _save(folder, model, _stored(model, prefix), None)


def save_quantized(
    folder: Path, model: PreTrainedModel, layout: str, quantize: Quantizer, *, prefix: str = ""
) -> dict[str, QuantizedWeight]:
    """Writes ``model`` in ``layout``, with every linear quantised for which ``quantize`` returns a weight.

    ``model`` becomes the dense reference: its weights are replaced by the dequantised ones.
    """
    tensors = _stored(model, prefix)
    tuples: dict[str, QuantizedWeight] = {}
    unquantized = ["lm_head"]
    for linear in describe(lambda: model).projections():
        module = model.get_submodule(linear.name)
        weight = module.weight.detach()
        q = quantize(linear.name, weight.t() if linear.transposed else weight)
        stored = linear.name.removeprefix(prefix)
        if q is None:
            unquantized.append(stored)
            continue
        tuples[stored] = q
        del tensors[f"{stored}.weight"]
        packed = INTEGERS[layout].pack(q)
        tensors.update({f"{stored}.{suffix}": tensor for suffix, tensor in packed.items()})
        replace_weight(module, q)
    config = write_quantization_config(
        FORMATS[layout], {name: spec_of(q) for name, q in tuples.items()}, unquantized
    )
    _save(folder, model, tensors, config)
    return tuples


def replace_weight(module: nn.Module, q: QuantizedWeight) -> None:
    """Gives a dense linear or Conv1D the dequantised weight of ``q``."""
    dense = q.dequantize(torch.float32)
    with torch.no_grad():
        module.weight.copy_(dense if isinstance(module, nn.Linear) else dense.t())


def save_tokenizer(folder: Path, model: PreTrainedModel | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with one token per byte, so that characters beyond ASCII have several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary.update({piece: index for index, piece in enumerate(alphabet, start=3)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    return fast


def _stored(model: PreTrainedModel, prefix: str) -> dict[str, Tensor]:
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name in getattr(model, "all_tied_weights_keys", {}):
        tensors.pop(name, None)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _save(
    folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor], quantization: dict[str, object] | None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict()
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder
