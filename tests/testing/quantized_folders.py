"""Tiny Llama-like checkpoints in every layout, made of random quantised weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.dtypes import dtype_name
from marlinq.core.scheme import Scheme, integer_element
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats import FORMATS, LAYOUTS, spec_of
from marlinq.formats.dialects import DIALECTS, write_quantization_config
from tests.testing.schemes import quantized

HIDDEN, INTERMEDIATE, VOCABULARY = 128, 256, 64
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, 64),
    "self_attn.v_proj": (HIDDEN, 64),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "dtype": "float16",
}
SIDE_FILES = {
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"temperature": 0.5}',
    "modeling_tiny.py": "raise SystemExit('never run')",
}


def random_tuple(
    k: int,
    n: int,
    seed: int,
    *,
    group_size: int = 32,
    zeros: str = "middle",
    scattered: bool = False,
    bits: int = 4,
    dtype: torch.dtype = torch.float16,
    sparse: bool = False,
) -> QuantizedWeight:
    """A random weight with codes over the whole range and scales of both signs.

    ``zeros`` is ``middle``, ``one-up`` or ``any``. With ``sparse``, at most two of four weights are not zero,
    whatever the scheme's sparsity is.
    """
    generator = torch.Generator().manual_seed(seed)
    size = k if group_size == -1 else min(group_size, k)
    groups = -(-k // size)
    scales = (0.3 + torch.rand(groups, n, generator=generator)) * 0.01
    scales *= torch.randint(0, 2, (groups, n), generator=generator) * 2 - 1
    points = torch.full((groups, n), 1 << (bits - 1), dtype=torch.uint8)
    if zeros != "middle":
        low = 1 if zeros == "one-up" else 0
        points = torch.randint(low, 1 << bits, (groups, n), generator=generator, dtype=torch.uint8)
        points[0, 0] = low
    g_idx = trivial_g_idx(k, size)
    if scattered:
        g_idx = g_idx[torch.randperm(k, generator=generator)]
    codes = torch.randint(0, 1 << bits, (k, n), generator=generator, dtype=torch.uint8)
    if sparse:
        kept = TWO_OF_FOUR.largest(torch.rand(k, n, generator=generator))
        codes = torch.where(kept, codes, points[g_idx.long()])
    return quantized(codes, scales.to(dtype), points, g_idx, size, integer_element(bits))


def model_tuples(*, lm_head: bool = False, **settings: Any) -> dict[str, QuantizedWeight]:
    """Name -> random weight for the linears of two blocks, and optionally lm_head."""
    shapes = {f"model.layers.{block}.{name}": shape for block in (0, 1) for name, shape in SHAPES.items()}
    if lm_head:
        shapes["lm_head"] = (HIDDEN, VOCABULARY)
    return {name: random_tuple(k, n, seed, **settings) for seed, (name, (k, n)) in enumerate(shapes.items())}


def plain_tensors(modules: Mapping[str, QuantizedWeight], *, bias: bool = False) -> dict[str, Tensor]:
    """Embedding and norms, with lm_head and biases where ``modules`` need them."""
    generator = torch.Generator().manual_seed(99)
    tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator).half()}
    for block in (0, 1):
        tensors[f"model.layers.{block}.input_layernorm.weight"] = torch.randn(HIDDEN, generator=generator)
    if "lm_head" not in modules:
        tensors["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    if bias:
        for name, q in modules.items():
            tensors[f"{name}.bias"] = torch.randn(q.out_features, generator=generator).half()
    return tensors


def write(
    folder: Path,
    layout: str,
    modules: Mapping[str, QuantizedWeight],
    *,
    plain: Mapping[str, Tensor] | None = None,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
    unquantized: tuple[str, ...] = ("lm_head",),
    scale_dtype: torch.dtype | None = None,
) -> Path:
    """Writes ``modules`` with the safetensors library; ``quantization`` overrides keys of the config."""
    folder.mkdir()
    plain = plain_tensors(modules) if plain is None else plain
    target = LAYOUTS[layout]
    stores_zeros = any(q.scheme.stores_zeros for q in modules.values())

    def declared(q: QuantizedWeight) -> Scheme:
        """The scheme of ``q`` with one kind of zero points for the whole checkpoint."""
        dtype = dtype_name(scale_dtype) if scale_dtype else target.scale_dtype or q.scheme.scale_dtype
        kind = "stored" if stores_zeros else "midpoint"
        return target.as_stored(replace(q.scheme, zero_point=kind, scale_dtype=dtype))

    tensors = dict(plain)
    for name, q in modules.items():
        packed = target.pack(q, declared(q))
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: files[index % shards] for index, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for index, file in enumerate(files):
        save_file({name: tensors[name] for name in names[index::shards]}, folder / file)
    specs = {name: replace(spec_of(q), scheme=declared(q)) for name, q in modules.items()}
    left = [name for name in unquantized if name not in modules]
    raw = {**write_quantization_config(FORMATS[layout], specs, left), **(quantization or {})}
    whole = {**CONFIG, **(config or {}), "quantization_config": raw}
    (folder / "config.json").write_text(json.dumps(whole))
    for name, value in DIALECTS[FORMATS[layout].dialect].extra_files(raw).items():
        (folder / name).write_text(json.dumps(value))
    for name, text in SIDE_FILES.items():
        (folder / name).write_text(text)
    return folder


def opened(folder: Path) -> QuantizedCheckpoint:
    """The quantised view of ``folder``."""
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


def assert_holds(folder: Path, layout: str, modules: Mapping[str, QuantizedWeight]) -> None:
    """``folder`` is a ``layout`` checkpoint of exactly ``modules``."""
    found = opened(folder)
    assert found.format.name == layout
    assert set(found.modules) == set(modules)
    for name, q in modules.items():
        difference = found.load(name).difference(q)
        assert difference is None, f"{name}: {difference}"


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor."""
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


def assert_same_tensors(one: Path, other: Path) -> None:
    """Both folders store the same names, dtypes, shapes and bytes."""
    mine, theirs = all_tensors(one), all_tensors(other)
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)
        ), name
