"""Measures memory and time of quantising a mixture of experts, block by block, on random weights.

    python lab/quality/experts_memory.py WORK --tokenizer FOLDER [--calibration FILE] [--layers N]

Writes a random Qwen3-30B-A3B of N layers (128 experts, 8 a token, 2048 and 768 channels) into WORK, quantises
it through the product's own operation, and prints after every block: seconds, resident memory of the process,
its peak so far, and memory allocated on the GPU with its peak so far. Random routers choose unevenly, so
some experts are short of tokens. Without a calibration file the text is random words, every document of the
longest length.

With --split the parts of a block are timed, and the device is waited for at the end of each, which takes a
little longer altogether. With --profile a thread looks at the main thread's stack every few milliseconds and
tells in which lines it was found.

Figures in docs/results.md: one H200, CUDA 13.0, torch 2.11.0.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parent))
from quantize_time import PARTS, split_into, write_text  # type: ignore[import-not-found]

from marlinq import quantize
from marlinq.operations.quantize.expert_solves import ExpertQuantizer
from marlinq.operations.quantize.expert_statistics import ExpertCalibration
from marlinq.operations.quantize.recipe import Recipe

EXPERTS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD = 128, 2048, 768, 32, 4, 128
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)


def main() -> None:
    """Write the model, quantise it, print the curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--recipe", type=json.loads, default={}, help="changes of the recipe, as JSON")
    options = parser.parse_args()
    model = options.work / "model"
    if not model.exists():
        start = time.monotonic()
        write(model, options.layers, options.experts, options.tokenizer)
        print(f"written in {time.monotonic() - start:.1f} s", flush=True)
    if options.calibration is None:
        options.calibration = options.work / "text.txt"
        # A word and its blank are nine bytes, a token at most three.
        write_text(options.calibration, options.samples, options.max_length // 2)
    shutil.rmtree(options.work / "int4", ignore_errors=True)
    shutil.rmtree(options.work / "int4.partial", ignore_errors=True)
    curve: list[dict[str, Any]] = []
    start = time.monotonic()
    gpu = torch.cuda.is_available() and options.device != "cpu"

    def note(what: str, done: int, total: int) -> None:
        if what != "quantising blocks":
            return
        row = {"blocks": done, "seconds": time.monotonic() - start, **memory(gpu)}
        curve.append(row)
        print(", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)

    recipe = Recipe(
        format="compressed-tensors",
        calibration=str(options.calibration),
        samples=options.samples,
        max_length=options.max_length,
    ).replace(**options.recipe)
    parts: dict[str, float] = {}
    if options.split:
        PARTS["experts' inputs and Hessians"] = (ExpertCalibration, "_gather")
        PARTS["experts solved and checked"] = (ExpertQuantizer, "_solve")
        split_into(parts)
    samples = Samples()
    if options.profile:
        samples.start()
    report = quantize(model, options.work / "int4", recipe=recipe, device=options.device, progress=note)
    samples.end()
    for part, took in parts.items():
        print(f"{part:34s} {took:7.2f} s, {took / options.layers:.3f} a block")
    samples.print()
    print(f"{time.monotonic() - start:.2f} s, {report.dtype}, {report.calibration}")
    print(report.render())
    if options.json:
        options.json.write_text(json.dumps({"layers": options.layers, "curve": curve}, indent=1))


class Samples:
    """Samples of the main thread's stack, taken every few milliseconds by another thread."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._done = threading.Event()
        self._lines: Counter[str] = Counter()
        self._leaves: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Starts sampling."""
        self._thread.start()

    def end(self) -> None:
        """Stops sampling."""
        self._done.set()

    def print(self) -> None:
        """Prints the share of samples for each line of the stack, and for its last line."""
        total = sum(self._leaves.values())
        for title, found in (("on the stack", self._lines), ("last", self._leaves)):
            for line, count in found.most_common(40) if total else ():
                print(f"{title}: {count / total:6.1%} {line}")

    def _watch(self) -> None:
        while not self._done.wait(0.004):
            frame = sys._current_frames().get(self._main or 0)
            lines = []
            while frame is not None:
                code = frame.f_code
                lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
                frame = frame.f_back
            self._lines.update(set(lines))
            self._leaves.update(lines[:1])


def memory(gpu: bool) -> dict[str, float]:
    """Gigabytes, current and peak: resident on the host, allocated on the GPU."""
    found = {
        "host": psutil.Process().memory_info().rss / 1e9,
        "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }
    if gpu:
        found["gpu"] = torch.cuda.memory_allocated() / 1e9
        found["gpu_peak"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def write(folder: Path, layers: int, experts: int, tokenizer: Path) -> None:
    """A random checkpoint as transformers names its tensors, a shard a layer."""
    folder.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, dtype=torch.bfloat16, device=device) * shape[-1] ** -0.5).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    shards: list[dict[str, str]] = []
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        tensors = {
            f"{stem}.input_layernorm.weight": ones(HIDDEN),
            f"{stem}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{stem}.self_attn.q_proj.weight": random(HEADS * HEAD, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD),
            f"{stem}.self_attn.q_norm.weight": ones(HEAD),
            f"{stem}.self_attn.k_norm.weight": ones(HEAD),
            f"{stem}.mlp.gate.weight": random(experts, HIDDEN),
        }
        for expert in range(experts):
            each = f"{stem}.mlp.experts.{expert}"
            tensors[f"{each}.gate_proj.weight"] = random(INTERMEDIATE, HIDDEN)
            tensors[f"{each}.up_proj.weight"] = random(INTERMEDIATE, HIDDEN)
            tensors[f"{each}.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
        shards.append(_saved(folder, tensors, layer))
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        num_experts=experts,
        num_experts_per_tok=min(8, experts),
        moe_intermediate_size=INTERMEDIATE,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    rest = {
        "model.embed_tokens.weight": random(config.vocab_size, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": random(config.vocab_size, HIDDEN),
    }
    shards.append(_saved(folder, rest, layers))
    index = {name: shard for found in shards for name, shard in found.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)


def _saved(folder: Path, tensors: dict[str, torch.Tensor], number: int) -> dict[str, str]:
    name = f"model-{number:05d}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return dict.fromkeys(tensors, name)


if __name__ == "__main__":
    main()
