"""Write a checkpoint of Llama 3's shape with random 4-bit weights, in any format, within seconds.

    python lab/runtime/random_checkpoint.py FOLDER --layers 32 --format marlin

It is for measuring how fast a checkpoint is loaded and decoded: the weights are noise, but scaled so that
activations stay finite (standard deviation 1 / sqrt(K)). The blocks of one checkpoint hold the same values.
A tokenizer with a vocabulary of the model's size comes along.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from marlinq.checkpoint.header import TensorPlan, encode_header, tensor_bytes
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import MarlinqError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, Scheme
from marlinq.core.weight import Grid
from marlinq.formats import FORMATS, LAYOUTS, Layout, ModuleSpec, spec_of
from marlinq.formats.dialects import write_quantization_config

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE = 4096, 14336, 32, 8, 128
VOCABULARY = 128256
_SHARD_BYTES = 5_000_000_000
# Root mean square of uniform codes 0 to 15 around 8.
_CODE_DEVIATION = math.sqrt(21.5)
_PIECE = 64 << 20


def projections() -> dict[str, tuple[int, int]]:
    """K and N of every linear of a block, by its name in the block."""
    attention, memory = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    return {
        "self_attn.q_proj": (HIDDEN, attention),
        "self_attn.k_proj": (HIDDEN, memory),
        "self_attn.v_proj": (HIDDEN, memory),
        "self_attn.o_proj": (attention, HIDDEN),
        "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
        "mlp.up_proj": (HIDDEN, INTERMEDIATE),
        "mlp.down_proj": (INTERMEDIATE, HIDDEN),
    }


def write_checkpoint(
    folder: Path,
    layout: str = "marlin",
    *,
    layers: int = 32,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
    vocabulary: int = VOCABULARY,
    tokenizer: bool = True,
) -> int:
    """Write the checkpoint; returns the bytes of its tensors.

    Args:
        folder: is made; must not hold a checkpoint yet.
        layout: layout of the quantised linears.
        layers: decoder blocks.
        group_size: input channels that share a scale.
        dtype: dtype of embedding, head and norms.
        vocabulary: rows of embedding and head.
        tokenizer: write one, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    specs: dict[str, ModuleSpec] = {}
    for seed, (name, (k, n)) in enumerate(projections().items()):
        packed, spec = _random_linear(LAYOUTS[layout], k, n, group_size, seed)
        for layer in range(layers):
            module = f"model.layers.{layer}.{name}"
            specs[module] = spec
            tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in packed.items()}
    _add_outer(tensors, layers, dtype, vocabulary)
    _write_shards(folder, tensors)
    quantization = write_quantization_config(FORMATS[layout], specs, ["lm_head"])
    config = {**_config(layers, vocabulary, dtype), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if tokenizer:
        write_tokenizer(folder, vocabulary)
    return sum(tensor.nbytes for tensor in tensors.values())


def write_original(
    folder: Path,
    *,
    layers: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    vocabulary: int = VOCABULARY,
    tokenizer: bool = True,
) -> int:
    """Write an unquantised checkpoint of the same shape; arguments and result as :func:`write_checkpoint`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, (k, n) in projections().items():
        weight = (_random_table(n, k) / math.sqrt(k)).to(dtype)
        tensors |= {f"model.layers.{layer}.{name}.weight": weight for layer in range(layers)}
    _add_outer(tensors, layers, dtype, vocabulary)
    _write_shards(folder, tensors)
    (folder / "config.json").write_text(json.dumps(_config(layers, vocabulary, dtype), indent=2))
    if tokenizer:
        write_tokenizer(folder, vocabulary)
    return sum(tensor.nbytes for tensor in tensors.values())


def _add_outer(tensors: dict[str, Tensor], layers: int, dtype: torch.dtype, vocabulary: int) -> None:
    """Embedding, head and norms."""
    norm = torch.ones(HIDDEN, dtype=dtype)
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = norm
    table = _random_table(vocabulary, HIDDEN)
    tensors["model.embed_tokens.weight"] = table.to(dtype)
    tensors["lm_head.weight"] = table.mul_(1 / math.sqrt(HIDDEN)).to(dtype)
    tensors["model.norm.weight"] = norm


def _random_linear(
    layout: Layout, k: int, n: int, group_size: int, seed: int
) -> tuple[dict[str, Tensor], ModuleSpec]:
    generator = torch.Generator().manual_seed(seed)
    groups = k // group_size
    scales = (0.5 + torch.rand(groups, n, generator=generator)) / (_CODE_DEVIATION * math.sqrt(k))
    grid = Grid.of(Scheme(INT4, Granularity.group(group_size), "midpoint"), (k, n), scales=scales.half())
    small = layout.pack_grid(grid, layout.as_stored(grid.scheme))
    spec = replace(spec_of(grid), scheme=layout.as_stored(grid.scheme))
    shape = layout.expected(spec)[layout.key].shape
    # Any word is eight codes, so noise needs no packing.
    pairs = torch.empty(math.prod(shape) // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return {layout.key: pairs.view(torch.int32).reshape(shape), **small}, spec


def _random_table(rows: int, columns: int) -> Tensor:
    """Normal numbers; rows that are far apart are multiples of each other, since drawing takes long."""
    drawn = torch.randn(min(rows, 8192), columns, generator=torch.Generator().manual_seed(99))
    table = torch.empty(rows, columns)
    for index, part in enumerate(table.split(drawn.shape[0])):
        torch.mul(drawn[: part.shape[0]], 1 - index / 64, out=part)
    return table


def _config(layers: int, vocabulary: int, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype_name(dtype),
    }


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Shards of at most 5 GB in the order of ``tensors``, written by several threads."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor() as pool:
        for index, names in enumerate(shards):
            file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            plans = [
                TensorPlan(name, dtype_name(tensors[name].dtype), tuple(tensors[name].shape))
                for name in names
            ]
            header, infos = encode_header(file, plans)
            weight_map |= dict.fromkeys(names, file)
            (folder / file).write_bytes(header)
            for info in infos:
                data = tensor_bytes(tensors[info.name])
                for start in range(0, info.nbytes, _PIECE):
                    piece = data[start : start + _PIECE]
                    pool.submit(_write_piece, folder / file, piece, info.offset + start)
    index_file = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))


def _write_piece(path: Path, piece: memoryview, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(piece)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A byte-level BPE with ``vocabulary`` tokens: all bytes, then pairs and triples of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece: index for index, piece in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    longer = list(alphabet)
    while len(pieces) < vocabulary:
        shorter, longer = longer, []
        for left in shorter:
            for right in alphabet:
                if len(pieces) < vocabulary:
                    pieces[left + right] = len(pieces)
                    merges.append((left, right))
                    longer.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=sorted(LAYOUTS), default="marlin")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    arguments = parser.parse_args()
    if (arguments.folder / "config.json").exists():
        print(f"error: {arguments.folder} holds a checkpoint already", file=sys.stderr)
        return 1
    nbytes = write_checkpoint(
        arguments.folder,
        arguments.format,
        layers=arguments.layers,
        group_size=arguments.group_size,
        vocabulary=arguments.vocabulary,
    )
    print(f"{arguments.folder}: {arguments.layers} layers, {arguments.format}, {nbytes / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MarlinqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
