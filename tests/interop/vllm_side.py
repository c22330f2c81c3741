"""Load checkpoints in vLLM for CPUs and say what they generate; runs in vLLM's environment.

    python tests/interop/vllm_side.py REQUEST

REQUEST is a JSON file: a list of ``folder``, ``prompts`` and ``forced`` (lists of token ids), ``new`` (tokens
to generate), ``environment`` and ``out``. The answer, in ``out``: ``tokens``, greedy; ``logprobs``, of every
token of ``forced`` but the first, given those before it; or ``error``. Each folder has a process of its own,
forked after vLLM was imported, which takes longer than all the rest.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """vLLM's answer to the folder."""
    import vllm

    engine = vllm.LLM(
        model=request["folder"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=128,
        max_num_seqs=8,
        seed=0,
    )

    def run(prompts: list[list[int]], **sampling: Any) -> Any:
        options = vllm.SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
        return engine.generate([{"prompt_token_ids": each} for each in prompts], options, use_tqdm=False)

    made = run(request["prompts"], max_tokens=request["new"])
    looked = run(request["forced"], max_tokens=1, prompt_logprobs=0)
    return {
        "tokens": [list(each.outputs[0].token_ids) for each in made],
        "logprobs": [
            [
                position[token].logprob
                for position, token in zip(each.prompt_logprobs[1:], text[1:], strict=True)
            ]
            for each, text in zip(looked, request["forced"], strict=True)
        ],
    }


def main() -> None:
    import vllm

    _ = vllm.LLM, vllm.SamplingParams  # imported when they are first named
    for request in json.loads(Path(sys.argv[1]).read_text()):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        os.environ.update(request["environment"])
        try:
            found = answer(request)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        Path(request["out"]).write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # the engine's clean-up may hang


if __name__ == "__main__":
    main()
