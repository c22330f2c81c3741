"""The gain of more bits in each part of a hybrid of delta nets and attention, trained here from nothing.

    python -m lab.quality.hybrid TEXT [TEXT ...] [--work FOLDER] [--seconds 65] [--row NAME] [--json OUT]

No trained hybrid is small enough to come with a package, so a small one of Qwen3.5's proportions is trained
in float32 on the texts and on the sources of Python's standard library, and stored in bfloat16. Its
quantisations are then compared on text that was held out; FOLDER keeps the trained model, which a second call
does not train again. Prints a Markdown table: mean bits per weight of the decoder's linears, and mean KL
divergence from the trained model on each text.
"""

from __future__ import annotations

import argparse
import math
import re
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from lab.quality.measuring import add_json, add_rows, conditions, measured, write_record
from marlinq import load, quantize
from marlinq.operations.quantize.recipe import Recipe

_NET, _ATTENTION, _MLP = r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$", "self_attn", "mlp"
ROWS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "everything in 4 bits": ({}, "", {}),
    "groups of 64": ({"group_size": 64}, "", {}),
    "groups of 32": ({"group_size": 32}, "", {}),
    "delta net's outputs in 8": ({}, r"linear_attn\.out_proj$", {"scheme": "int8"}),
    "delta net's inputs in 8": ({}, r"linear_attn\.in_proj_(qkv|z)$", {"scheme": "int8"}),
    "delta net in 8": ({}, _NET, {"scheme": "int8"}),
    "delta net in 16": ({}, _NET, {"skip": True}),
    "MLP's outputs in 8": ({}, r"down_proj$", {"scheme": "int8"}),
    "MLP in 8": ({}, _MLP, {"scheme": "int8"}),
    "attention in 8": ({}, _ATTENTION, {"scheme": "int8"}),
}
"""Title of a row -> (changes of the recipe, modules of an override, settings of the override)."""
_TOKENS = 256
"""tokens of a window, in training and evaluation"""
_HELD_OUT = 0.1
"""share of each text, at its end, that is not trained on"""
_SOURCES = 12_000_000
"""bytes of Python sources to train on"""
_CHUNK = 32
"""tokens of a chunk of the delta rule: torch's loop over them is shorter than with 64"""


def main() -> None:
    """Train, quantise, evaluate, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, default=Path("hybrid"))
    parser.add_argument("--seconds", type=float, default=65.0, help="of training")
    parser.add_argument("--batch", type=int, default=96, help="windows of a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--windows", type=int, default=24, help="of evaluation, from each text")
    add_rows(parser, ROWS)
    add_json(parser)
    parser.set_defaults(length=_TOKENS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model_folder, held = _trained(options)
    original = load(model_folder, device=options.device, dtype="float32", progress=False)
    lines = conditions(original, f"trained for {options.seconds:.0f} s, hidden size {options.hidden}")
    blocks = original.model.model.layers
    linears = sum(each.weight.numel() for each in blocks.modules() if isinstance(each, nn.Linear))
    base = {
        "method": options.method,
        "format": "compressed-tensors",
        "calibration": str(held[0].with_name("calibration.txt")),
        "samples": 64,
        "max_length": _TOKENS,
    }
    titles = ["", "bits a weight", *(f"KL, {text.stem}" for text in held)]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.rows or ROWS:
        recipe, modules, settings = ROWS[name]
        began, folder = time.perf_counter(), options.work / name.replace(" ", "-")
        overrides = [{"match": modules, **settings}] if modules else []
        if not modules or not re.search(modules, "linear_attn.out_proj"):
            # Asked for here, because the recipe's own rule for this projection is another.
            overrides.append({"match": r"linear_attn\.out_proj$", "scheme": "int4"})
        settled = Recipe.from_dict({"group_size": 128, **base, **recipe, "overrides": overrides})
        if not folder.exists():
            quantize(model_folder, folder, recipe=settled, device=options.device, progress=False)
        bits = 16 - 8 * (_size(model_folder) - _size(folder)) / linears
        row: dict[str, Any] = {"row": name, "bits": bits}
        for text in held:
            result = measured(folder, original, text, options)
            row[text.stem] = {"kl": result.kl, "perplexity": result.against_perplexity}
        rows.append({**row, "seconds": time.perf_counter() - began})
        cells = [name, f"{bits:.3f}", *(f"{row[text.stem]['kl']:.4f}" for text in held)]
        print(f"| {' | '.join(cells)} |", flush=True)
        write_record(options.json, lines, rows)
    found = ", ".join(f"{text.stem} {rows[0][text.stem]['perplexity']:.1f}" for text in held)
    print(f"\nperplexity of the trained model: {found}\n" + "\n".join(lines))


def _trained(options: argparse.Namespace) -> tuple[Path, list[Path]]:
    """(folder of the trained model, files of held-out text)."""
    trained, held = [], []
    for path in options.text:
        text = path.read_text(encoding="utf-8", errors="replace")
        cut = int(len(text) * (1 - _HELD_OUT))
        trained.append(text[:cut])
        held.append(options.work / path.name)
        held[-1].write_text(text[cut:], encoding="utf-8")
    (options.work / "calibration.txt").write_text(trained[0], encoding="utf-8")
    folder = options.work / "model"
    if not (folder / "config.json").exists():
        sources = _sources()
        encode = _tokenizer([*trained, sources], folder)
        model = _train(options, [encode(text) for text in ("\n".join(trained), sources)])
        model.cpu().to(torch.bfloat16).save_pretrained(folder)
    return folder, held


def _size(folder: Path) -> int:
    """Bytes of all tensors."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _sources() -> str:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files += sorted(Path(torch.__file__).parent.rglob("*.py"))
    text = ""
    for path in files:
        if len(text) > _SOURCES:
            break
        text += path.read_text(encoding="utf-8", errors="replace")
    return text


def _tokenizer(texts: list[str], folder: Path) -> Any:
    """Text -> tensor of token ids; the tokenizer itself is written into ``folder``."""
    bpe = ByteLevelBPETokenizer()
    lines = [text[start : start + 4000] for text in texts for start in range(0, 1_000_000, 4000)]
    bpe.train_from_iterator(lines, vocab_size=2048, special_tokens=["<end>"], show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "bpe.json"))
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "bpe.json"), eos_token="<end>").save_pretrained(
        folder
    )

    def encode(text: str) -> Tensor:
        pieces = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
        return torch.tensor([token for each in bpe.encode_batch(pieces) for token in each.ids])

    return encode


def _train(options: argparse.Namespace, data: list[Tensor]) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    hidden = options.hidden
    config = Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=hidden // 128,
        linear_num_value_heads=hidden // 64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    model = Qwen3_5ForCausalLM(config).to(options.device, torch.float32).train()
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = partial(torch_chunk_gated_delta_rule, chunk_size=_CHUNK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    data = [each.to(options.device) for each in data]
    began, step, loss = time.perf_counter(), 0, torch.zeros(())
    while (passed := (time.perf_counter() - began) / options.seconds) < 1:
        for group in optimizer.param_groups:
            decayed = 0.05 + 0.95 * (1 + math.cos(math.pi * passed)) / 2
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 40) * decayed
        halves = [_windows(each, options.batch // 2) for each in data]
        ids = torch.cat(halves)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step}, {passed:.0%} of the time: loss {float(loss.detach()):.3f}", flush=True)
    print(f"{step} steps, last loss {float(loss.detach()):.3f}\n", flush=True)
    return model.eval()


def _windows(ids: Tensor, count: int) -> Tensor:
    starts = torch.randint(len(ids) - _TOKENS, (count,), device=ids.device)
    return ids[starts[:, None] + torch.arange(_TOKENS, device=ids.device)]


if __name__ == "__main__":
    main()
