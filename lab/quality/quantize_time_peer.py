"""Measures the time of llm-compressor's GPTQ on the checkpoint and text of quantize_time.py, disk to disk.

    python lab/quality/quantize_time.py FOLDER --layers 8         # writes both, and times marlinq
    python lab/quality/quantize_time_peer.py FOLDER --layers 8    # the peer, on the same tokens

Both quantise the same linears to symmetric 4 bits in groups of 128. Like there, a run's time with 32 blocks
follows from those of a few: whole run less blocks, plus 32 times a block. A block ends for the peer when the
next one's statistics begin; the last one ends with the output head's graph. Its observer is its default,
or the one that is best in quality with --observer imatrix_mse.

Figures in docs/results.md: one H200, CUDA 13.0, torch 2.11.0, llm-compressor 0.14.0.1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from marlinq.calibration import load_tokenizer, read_documents
from marlinq.checkpoint import Checkpoint


def read_batches(model: Path, text: Path, samples: int, max_length: int) -> list[dict[str, torch.Tensor]]:
    """The documents that marlinq calibrates on, one a batch: int64 ids and mask of (1, tokens)."""
    documents = read_documents(
        str(text),
        tokenizer=lambda: load_tokenizer(model),
        samples=samples,
        max_length=max_length,
        seed=0,
        vocabulary=Checkpoint.open(model).config["vocab_size"],
    )
    rows = [torch.tensor([document.tokens]) for document in documents]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]


def quantise(
    model: Path, out: Path, batches: list[dict[str, torch.Tensor]], observer: str | None
) -> list[float]:
    """Load, quantise and save with the peer's code; the times at which blocks were solved."""
    from llmcompressor import oneshot
    from llmcompressor.core import LifecycleCallbacks
    from llmcompressor.modifiers.gptq import GPTQModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    solved: list[float] = []
    end_of_block = LifecycleCallbacks.sequential_epoch_end

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = end_of_block(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        solved.append(time.monotonic())
        return result

    LifecycleCallbacks.sequential_epoch_end = noted
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    if observer is not None:
        weights["observer"] = observer
    scheme = {"targets": ["Linear"], "weights": weights}
    oneshot(
        model=loaded,
        processor=tokenizer,
        dataset=DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
        recipe=[GPTQModifier(ignore=["lm_head"], config_groups={"group_0": scheme})],
        num_calibration_samples=len(batches),
    )
    loaded.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    return solved


def main() -> None:
    """Quantise, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--observer", help="of the weights; the peer's default if left out")
    arguments = parser.parse_args()
    model, out = arguments.folder / f"original-{arguments.layers}", arguments.folder / "quantized-peer"
    shutil.rmtree(out, ignore_errors=True)
    start = time.monotonic()
    text = arguments.folder / "text.txt"
    batches = read_batches(model, text, arguments.samples, arguments.max_length)
    print(f"tokens {sum(batch['input_ids'].numel() for batch in batches)}", flush=True)
    # The time of reading tokens is left out, since marlinq's code does it.
    reading = time.monotonic() - start
    start = time.monotonic()
    solved = quantise(model, out, batches, arguments.observer)
    seconds = time.monotonic() - start
    each = [b - a for a, b in itertools.pairwise(solved[: arguments.layers])]
    if len(each) < 2:
        raise SystemExit(f"error: {len(solved)} blocks were seen, expected {arguments.layers}")
    steady = sorted(each)[len(each) // 2]
    around = seconds - (solved[arguments.layers - 1] - solved[0])
    print(f"llmcompressor {importlib.metadata.version('llmcompressor')}, torch {torch.__version__}")
    print(f"whole run {seconds:.2f} s (tokens read in {reading:.2f} s before)")
    print("blocks", " ".join(f"{value:.3f}" for value in each))
    print(f"median block {steady:.3f} s; 32 of them and the rest: {around + 31 * steady:.1f} s")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(f"peak host {host / 1e9:.2f} GB, device {device / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
