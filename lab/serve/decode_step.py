"""One decode step in vLLM's offline engine, with its own kernels and with marlinq's plugin.

    python lab/serve/decode_step.py FOLDER [--batches 1,4,16,64] [--context 128] [--repeats 3] [--json OUT]

Each engine runs in a process of its own, one after the other. A step is the time of LONG new tokens less that
of SHORT, over their difference: prefill, the first step's scheduling and set-up cancel. The median of the
repeats counts. Prompts are random token ids, so no tokenizer is needed. vLLM for CUDA and marlinq have to be
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHORT, LONG = 16, 144
ENGINES = {"vLLM": "off", "vLLM with marlinq": "linear"}
"""What is timed, and the value of MARLINQ_VLLM that makes it."""


def main() -> None:
    """Time both engines, print a table."""
    options = _options()
    if options.one:
        print(json.dumps(measure(options)))
        sys.stdout.flush()
        os._exit(0)  # the engine's clean-up may hang
    found = {name: _in_a_process(mode) for name, mode in ENGINES.items()}
    print(f"{'batch':>5}", *(f"{name:>20}" for name in found), f"{'ratio':>7}")
    for batch in options.batches:
        own, plugin = (engine["milliseconds"][str(batch)] for engine in found.values())
        print(f"{batch:>5} {own:>17.3f} ms {plugin:>17.3f} ms {plugin / own:>7.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Versions, device, seconds of loading, and milliseconds a step by batch."""
    import torch
    import vllm

    began = time.perf_counter()
    engine = vllm.LLM(
        model=str(options.folder),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_model_len=2048,
        max_num_seqs=max(options.batches),
        enable_prefix_caching=False,
        seed=0,
    )
    loaded = time.perf_counter() - began
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    draw = random.Random(0)
    prompt_tokens = options.context - (SHORT + LONG) // 2

    def seconds(batch: int, new_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(prompt_tokens)]}
            for _ in range(batch)
        ]
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    milliseconds = {}
    for batch in options.batches:
        seconds(batch, SHORT)
        steps = [
            (seconds(batch, LONG) - seconds(batch, SHORT)) / (LONG - SHORT) for _ in range(options.repeats)
        ]
        milliseconds[str(batch)] = 1e3 * statistics.median(steps)
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "load_seconds": loaded,
        "context": options.context,
        "milliseconds": milliseconds,
    }


def _in_a_process(mode: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one"]
    run = subprocess.run(
        command, env=os.environ | {"MARLINQ_VLLM": mode}, stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def _batches(text: str) -> list[int]:
    return [int(batch) for batch in text.split(",")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=_batches, default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=128, help="mean tokens of context, at least 81")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", action="store_true", help="time one engine in this process")
    options = parser.parse_args()
    if options.context <= (SHORT + LONG) // 2:
        parser.error(f"--context {options.context}: expected more than {(SHORT + LONG) // 2}")
    return options


if __name__ == "__main__":
    main()
