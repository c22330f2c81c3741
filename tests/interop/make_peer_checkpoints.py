"""Write tiny checkpoints with the published peers' own quantisation and saving code.

    python tests/interop/make_peer_checkpoints.py OUT [--writer NAME] [--only SUBSTRING]

Every model is a random two-layer Llama (see ``save_base``). Which checkpoints are written depends on the
packages that can be imported here: GPTQModel writes the GPTQ and AWQ ones, compressed-tensors or
llm-compressor the pack-quantized ones. Folders that exist already are kept. Each folder also receives
``peer.json``: the writer, its version and what was asked of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Only for this script's own process: whoever imports the file may want the GPU.
if __name__ == "__main__":
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its thread pool needs two workers even on two cores
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

VOCABULARY = 320
HIDDEN = 256
INTERMEDIATE = 512
PEER_NOTE = "peer.json"

Writer = Callable[[Path, Path, dict[str, Any]], None]


def save_base(path: Path, dtype: torch.dtype, *, bias: bool = False, shifted: bool = False) -> None:
    """A random Llama and a word-level tokenizer in ``path``.

    ``bias`` gives the attention projections a bias. ``shifted`` makes every fifth output row of every
    linear all positive and every seventh all negative, which drives asymmetric zero points to 0 and to
    the largest code.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        attention_bias=bias,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or name == "lm_head":
                continue
            if module.bias is not None:
                module.bias.normal_(std=0.02)
            if shifted:
                module.weight[::5] = module.weight[::5].abs() + 0.01
                module.weight[::7] = -module.weight[::7].abs() - 0.01
    model.to(dtype).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t0", eos_token="t1", pad_token="t2", unk_token="t3"
    ).save_pretrained(path)


def calibration_tokens(count: int = 16, length: int = 64) -> torch.Tensor:
    """Seeded random token ids, [count, length] int64."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (count, length), generator=generator)


def _batches() -> list[dict[str, list[int]]]:
    return [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in calibration_tokens()]


def write_gptqmodel(base: Path, out: Path, options: dict[str, Any]) -> None:
    """Quantise with GPTQModel and save; ``options`` are ``QuantizeConfig`` arguments."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=options.get("bits", 4), offload_to_disk=False, **_without(options, "bits"))
    model = GPTQModel.load(str(base), config, trust_remote_code=False, dtype=torch.float16)
    # Its default AWQ packer asks for CUDA; the torch one writes the same layout.
    backend = {"backend": BACKEND.AWQ_TORCH} if options.get("method") == "awq" else {}
    model.quantize(_batches(), batch_size=1, **backend)
    model.save(str(out))


def write_compressed_tensors(base: Path, out: Path, options: dict[str, Any]) -> None:
    """Round to nearest with compressed-tensors' own observers' maths, compress and save."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    arguments = QuantizationArgs(num_bits=4, type="int", **options)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.INITIALIZED,
        format="pack-quantized",
    )
    apply_quantization_config(model, config)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is None:
                continue
            n, k = module.weight.shape
            grouped = module.weight.reshape(n, -1, options.get("group_size") or k)
            scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            if not arguments.symmetric:
                module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))
    AutoTokenizer.from_pretrained(base).save_pretrained(out)


def write_llmcompressor(base: Path, out: Path, options: dict[str, Any]) -> None:
    """Quantise with llm-compressor's GPTQ and save; ``options`` are ``QuantizationArgs`` of the weights."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    weights = {"num_bits": 4, "type": "int", **options}
    recipe = GPTQModifier(
        ignore=["lm_head"],
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        actorder=weights.pop("actorder", None),
    )
    oneshot(
        model=model,
        dataset=Dataset.from_list(_batches()),
        recipe=recipe,
        max_seq_length=64,
        num_calibration_samples=16,
    )
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _awq(group_size: int, sym: bool = False) -> dict[str, Any]:
    return {"method": "awq", "format": "gemm", "group_size": group_size, "sym": sym}


GPTQMODEL: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq-sym-g32": ("plain", {"group_size": 32}),
    "gptq-sym-g64": ("plain", {"group_size": 64}),
    "gptq-sym-g128": ("plain", {"group_size": 128}),
    "gptq-sym-channel": ("plain", {"group_size": -1, "act_group_aware": False}),
    "gptq-sym-bias-g64": ("bias", {"group_size": 64}),
    "gptq-asym-g64": ("plain", {"group_size": 64, "sym": False}),
    "gptq-asym-shifted-g32": ("shifted", {"group_size": 32, "sym": False}),
    "gptq-desc-act-g64": ("plain", {"group_size": 64, "desc_act": True, "act_group_aware": False}),
    "gptq-desc-act-static-g64": (
        "plain",
        {"group_size": 64, "desc_act": True, "static_groups": True, "act_group_aware": False},
    ),
    "gptq-sym-8bit-g64": ("plain", {"bits": 8, "group_size": 64}),
    "gptq-dynamic-g128": (
        "plain",
        {
            "group_size": 128,
            "dynamic": {
                r"-:.*\.layers\.0\.mlp\.down_proj": {},
                r"+:.*\.layers\.1\.mlp\.down_proj": {"bits": 4, "group_size": 64},
            },
        },
    ),
    "gptq-v2-sym-g64": ("plain", {"group_size": 64, "format": "gptq_v2"}),
    "gptq-v2-asym-g128": ("plain", {"group_size": 128, "sym": False, "format": "gptq_v2"}),
    "gptq-v2-asym-shifted-g32": ("shifted", {"group_size": 32, "sym": False, "format": "gptq_v2"}),
    "gptq-v2-asym-desc-act-g64": (
        "plain",
        {"group_size": 64, "sym": False, "desc_act": True, "act_group_aware": False, "format": "gptq_v2"},
    ),
    "awq-asym-g32": ("plain", _awq(32)),
    "awq-asym-g64": ("plain", _awq(64)),
    "awq-asym-g128": ("plain", _awq(128)),
    "awq-asym-shifted-g64": ("shifted", _awq(64)),
    "awq-asym-bias-g64": ("bias", _awq(64)),
}

_GROUPED: dict[str, tuple[str, dict[str, Any]]] = {
    "sym-g32": ("plain", {"symmetric": True, "strategy": "group", "group_size": 32}),
    "sym-g128": ("plain", {"symmetric": True, "strategy": "group", "group_size": 128}),
    "sym-bf16-g64": ("bf16", {"symmetric": True, "strategy": "group", "group_size": 64}),
    "sym-channel": ("plain", {"symmetric": True, "strategy": "channel"}),
    "asym-g64": ("plain", {"symmetric": False, "strategy": "group", "group_size": 64}),
    "asym-bf16-g32": ("bf16", {"symmetric": False, "strategy": "group", "group_size": 32}),
    "asym-shifted-g64": ("shifted", {"symmetric": False, "strategy": "group", "group_size": 64}),
    "asym-bf16-channel": ("bf16", {"symmetric": False, "strategy": "channel"}),
}

COMPRESSED_TENSORS = {f"ct-{name}": case for name, case in _GROUPED.items()}

LLMCOMPRESSOR = {f"llmc-{name}": case for name, case in _GROUPED.items()} | {
    "llmc-sym-static-order-g64": (
        "plain",
        {"symmetric": True, "strategy": "group", "group_size": 64, "actorder": "static"},
    ),
}

WRITERS: dict[str, tuple[str, Writer, dict[str, tuple[str, dict[str, Any]]]]] = {
    "gptqmodel": ("gptqmodel", write_gptqmodel, GPTQMODEL),
    "compressed-tensors": ("compressed_tensors", write_compressed_tensors, COMPRESSED_TENSORS),
    "llmcompressor": ("llmcompressor", write_llmcompressor, LLMCOMPRESSOR),
}

BASES: dict[str, dict[str, Any]] = {
    "plain": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16},
    "bias": {"dtype": torch.float16, "bias": True},
    "shifted": {"dtype": torch.float16, "shifted": True},
}


def make(out: Path, writers: list[str], only: str = "") -> list[Path]:
    """Write the missing checkpoints of ``writers`` whose name contains ``only``; their folders."""
    folders = []
    for writer in writers:
        package, write, cases = WRITERS[writer]
        for name, (base_name, options) in cases.items():
            if only not in name:
                continue
            base = out / "base" / base_name
            if not (base / "config.json").exists():
                save_base(base, **BASES[base_name])
            folder = out / "checkpoints" / name
            folders.append(folder)
            if (folder / PEER_NOTE).exists():
                continue
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write(base, folder, dict(options))
            note = {
                "writer": writer,
                "version": importlib.metadata.version(package),
                "base": base_name,
                "options": options,
            }
            (folder / PEER_NOTE).write_text(json.dumps(note, indent=2))
    return folders


def available_writers() -> list[str]:
    """The writers whose package can be imported here."""
    return [name for name, (package, _, _) in WRITERS.items() if importlib.util.find_spec(package)]


def main() -> None:
    """Parse the command line and write what can be written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--writer", action="append", choices=list(WRITERS), help="default: all available")
    parser.add_argument("--only", default="", help="substring of the checkpoint name")
    arguments = parser.parse_args()
    for folder in make(arguments.out, arguments.writer or available_writers(), arguments.only):
        print(folder)


if __name__ == "__main__":
    main()
