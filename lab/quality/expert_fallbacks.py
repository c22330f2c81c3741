"""Compares the fallbacks for experts that few calibration tokens reach.

    python lab/quality/expert_fallbacks.py WORK --text FILE [--steps N] [--json OUT]

Trains a small mixture (2 layers, 16 experts of 64 channels, 2 a token, no balancing loss, so that routing is
uneven as in real models) on the bytes of the first nine tenths of a text, quantises it in 4 bits on a few
calibration passages with every fallback and threshold, and measures mean KL divergence from the original on
the last tenth. Everything runs on the CPU in float32.

Figures in docs/guide.md: AMD EPYC, torch 2.13.0+cpu.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from marlinq import evaluate, quantize
from marlinq.operations.quantize.recipe import Recipe

_BATCH, _LENGTH = 8, 128
WAYS: dict[str, dict[str, Any]] = {
    "routed alone": {"expert_tokens": 0},
    **{
        f"{way}, below {least}": {"expert_fallback": way, "expert_tokens": least}
        for least in (64, 256, 1024)
        for way in ("blend", "all", "shared")
    },
    "every token for all": {"experts": "all"},
}


def main() -> None:
    """Train, quantise, measure, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    text = options.text.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    held_out, calibration = options.work / "held-out.txt", options.work / "calibration.txt"
    held_out.write_text(text[cut:], encoding="utf-8")
    calibration.write_text(text[:cut], encoding="utf-8")
    model = options.work / "model"
    if not model.exists():
        train(model, text[:cut], options.steps)
    rows = []
    for name, changes in WAYS.items():
        recipe = Recipe(
            group_size=32, calibration=str(calibration), samples=options.samples, max_length=_LENGTH
        ).replace(**changes)
        out = options.work / name.replace(", ", "-").replace(" ", "-")
        if out.exists():
            continue
        report = quantize(model, out, recipe=recipe, device="cpu")
        found = evaluate(
            out,
            against=model,
            text=str(held_out),
            windows=options.windows,
            length=_LENGTH,
            device="cpu",
            dtype="float32",
        )
        fallbacks = len({n.rpartition(".")[0] for n in report.fallbacks})
        rows.append({"way": name, "fallbacks": fallbacks, "kl": found.kl})
        print(f"{name:24} {fallbacks:3d} experts  mean KL {rows[-1]['kl']:.6f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def train(folder: Path, text: str, steps: int) -> None:
    """Trains a small mixture on ``text`` and saves it in ``folder``."""
    torch.manual_seed(0)
    tokenizer = _bytes()
    ids = torch.tensor(tokenizer(text[: 2 << 20])["input_ids"])
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        starts = torch.randint(len(ids) - _LENGTH - 1, (_BATCH,))
        batch = torch.stack([ids[start : start + _LENGTH] for start in starts.tolist()])
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _bytes() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary.update({piece: index for index, piece in enumerate(alphabet, start=3)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


if __name__ == "__main__":
    main()
