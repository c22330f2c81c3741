"""Times one vLLM offline engine; runs in a process of its own.

Prompts are random token ids, so no tokenizer is needed.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHORT, LONG = 16, 144
"""new tokens of two runs; the difference of their times is that of LONG - SHORT steps"""
_FIRST_TOKEN_REPEATS = 5
_MOST_TOKENS_OF_A_BATCH = 16384
_WARM_UP = 4  # the mixed load is first run with one request in so many


def main(request: str, out: str) -> None:
    """Times a workload and ends the process.

    Args:
        request: JSON file with ``workload``, a :class:`marlinq.operations.bench.serve.Workload`, and
            ``engine``, the engine's name.
        out: JSON file of a :class:`marlinq.operations.bench.serve.ServeBench`, to whose ``engines`` each
            measurement is added as soon as it is made.
    """
    import torch
    import vllm

    given = json.loads(Path(request).read_text(encoding="utf-8"))
    asked = given["workload"]
    began = time.perf_counter()
    longest = max(asked["context"] + LONG, asked["prompt_tokens"] + 1, sum(_longest(asked)))
    engine = vllm.LLM(
        model=asked["checkpoint"],
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        tensor_parallel_size=asked["gpus"],
        max_model_len=longest,
        max_num_seqs=max(*asked["batches"], *asked["prompts"], asked["requests"]),
        max_num_batched_tokens=max(longest, _MOST_TOKENS_OF_A_BATCH),
        enable_prefix_caching=False,
        seed=0,
    )
    found: dict[str, Any] = {
        "versions": f"vLLM {vllm.__version__}, torch {torch.__version__}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "load_seconds": time.perf_counter() - began,
        "step_seconds": {},
        "first_token_seconds": {},
        "tokens_per_second": None,
        "complete": False,
    }
    draw = random.Random(0)
    vocabulary = engine.llm_engine.model_config.get_vocab_size()

    def seconds(lengths: Sequence[int], new: Sequence[int]) -> float:
        prompts = [{"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(n)]} for n in lengths]
        sampling = [
            vllm.SamplingParams(
                temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
            )
            for n in new
        ]
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def keep() -> None:
        report = json.loads(Path(out).read_text(encoding="utf-8"))
        report["engines"][given["engine"]] = found
        partial = Path(f"{out}.part")
        partial.write_text(json.dumps(report), encoding="utf-8")
        partial.replace(out)

    prompt = asked["context"] - (SHORT + LONG) // 2
    for batch in asked["batches"]:
        seconds([prompt] * batch, [SHORT] * batch)
        steps = [
            (seconds([prompt] * batch, [LONG] * batch) - seconds([prompt] * batch, [SHORT] * batch))
            / (LONG - SHORT)
            for _ in range(asked["repeats"])
        ]
        found["step_seconds"][str(batch)] = statistics.median(steps)
        keep()
    for prompts in asked["prompts"]:
        lengths = [asked["prompt_tokens"]] * prompts
        seconds(lengths, [1] * prompts)
        times = [seconds(lengths, [1] * prompts) for _ in range(_FIRST_TOKEN_REPEATS)]
        found["first_token_seconds"][str(prompts)] = statistics.median(times)
        keep()
    if asked["requests"]:
        lengths, new = requests(asked["requests"])
        seconds(lengths[::_WARM_UP], [SHORT] * len(lengths[::_WARM_UP]))
        found["tokens_per_second"] = sum(new) / seconds(lengths, new)
    found["complete"] = True
    keep()
    sys.stdout.flush()
    os._exit(0)  # the engine's clean-up may hang


def requests(count: int) -> tuple[list[int], list[int]]:
    """(tokens per prompt, 128 to 1,024; new tokens, 64 to 256) of a mixed load, the same in every run."""
    plan = random.Random(1)
    return [plan.randrange(128, 1025) for _ in range(count)], [plan.randrange(64, 257) for _ in range(count)]


def _longest(asked: dict[str, Any]) -> tuple[int, int]:
    lengths, new = requests(asked["requests"])
    return max(lengths, default=0), max(new, default=0)
