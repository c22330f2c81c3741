"""Checks that a GPU continues prompts like a CPU, token by token, in every format.

    python lab/quality/same_text.py CKPT [CKPT ...] --tokens 256 --dtype float16 --dtype bfloat16

The checkpoints hold the same weights in different formats. The reference is transformers' own forward pass on
the CPU in float32 with the dequantised weights of the first; the others run as ``marlinq generate`` runs
them. Both decode greedily. Where they part, the reference's logits of the two tokens tell a near tie from an
error. For the first prompt the reference's tokens are then decoded step by step, and the logits of all steps
are compared.

Exits with 1 where a text parts at two tokens whose reference logits are further apart than twice the largest
error of a logit that was measured in that dtype: rounding can't explain that.

Figures in docs/results.md: one H200, CUDA 13.0, torch 2.11.0, transformers 5.17.0.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlinq.core.errors import MarlinqError
from marlinq.runtime import generate, load
from marlinq.runtime.loading import LoadedModel
from marlinq.runtime.step.forward_choice import choose_forward

PROMPTS = (
    "The history of the lighthouse begins",
    "To bake a loaf of bread at home, first",
    "In mathematics, a prime number is",
    "Once upon a time, in a village by the sea,",
    "The main difference between a compiler and an interpreter is",
)


@dataclass(frozen=True)
class Reference:
    """The reference's continuation of one prompt.

    Attributes:
        prompt: token ids of the prompt.
        tokens: greedy tokens.
        logits: float32 [tokens, vocabulary], from which each token was chosen.
        text: text of the tokens.
    """

    prompt: list[int]
    tokens: list[int]
    logits: Tensor
    text: str


@dataclass(frozen=True)
class Comparison:
    """Results of one prompt with one checkpoint in one dtype.

    Attributes:
        checkpoint, dtype, prompt: names of the run.
        tokens: number of tokens of the reference.
        agreeing: number of tokens before the first that differs.
        margin: at that token, the reference's logit of its own token minus that of the other token.
        relative_error: norm of the difference of all logits over the norm of the reference's; None where
            they were not compared.
        largest_error: largest error of a logit; None where they were not compared.
        step: how decode steps ran.
    """

    checkpoint: str
    dtype: str
    prompt: str
    tokens: int
    agreeing: int
    margin: float | None
    relative_error: float | None
    largest_error: float | None
    step: str


@torch.no_grad()
def continued(reference: LoadedModel, prompt: str, tokens: int) -> Reference:
    """``tokens`` greedy tokens by transformers' forward pass, whole sequences at a time."""
    tokenizer: Any = reference.tokenizer
    ids: list[int] = tokenizer(prompt)["input_ids"]
    output = reference.model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    found = output[0, len(ids) :].tolist()
    logits = reference.model(output[:, :-1]).logits[0, len(ids) - 1 :].float()
    return Reference(ids, found, logits, tokenizer.decode(found))


@torch.no_grad()
def logits_of_steps(subject: LoadedModel, expected: Reference) -> Tensor:
    """[tokens, vocabulary]: the subject's logits when it decodes the reference's tokens."""
    forward = choose_forward(subject, 1, len(expected.prompt) + len(expected.tokens))
    ids = torch.tensor([expected.prompt], device=subject.device)
    rows = [forward.prefill(ids, torch.tensor([len(expected.prompt)], dtype=torch.int32)).float().cpu()]
    rows += [
        forward.step(torch.tensor([token], device=subject.device)).float().cpu()
        for token in expected.tokens[:-1]
    ]
    return torch.cat(rows)


@torch.no_grad()
def compare(
    subject: LoadedModel, name: str, prompt: str, expected: Reference, *, with_logits: bool
) -> Comparison:
    """Continues ``prompt`` with ``subject``, then decodes the reference's tokens if ``with_logits``."""
    found = generate(subject, expected.prompt, max_new_tokens=len(expected.tokens))
    agreeing = next(
        (place for place, (a, b) in enumerate(zip(expected.tokens, found.tokens, strict=False)) if a != b),
        min(len(expected.tokens), len(found.tokens)),
    )
    margin = None
    if agreeing < min(len(expected.tokens), len(found.tokens)):
        row = expected.logits[agreeing]
        margin = float(row[expected.tokens[agreeing]] - row[found.tokens[agreeing]])
    difference = logits_of_steps(subject, expected) - expected.logits if with_logits else None
    return Comparison(
        checkpoint=name,
        dtype=str(subject.dtype).removeprefix("torch."),
        prompt=prompt,
        tokens=len(expected.tokens),
        agreeing=agreeing,
        margin=margin,
        relative_error=None if difference is None else float(difference.norm() / expected.logits.norm()),
        largest_error=None if difference is None else float(difference.abs().max()),
        step=found.step.reason,
    )


def describe(one: Comparison) -> str:
    """One line."""
    parting = "" if one.margin is None else f", then {one.margin:.4f} apart in the reference's logits"
    logits = (
        ""
        if one.largest_error is None
        else (f"; logits off by {one.relative_error:.1e}, at most {one.largest_error:.3f}")
    )
    agreeing = f"{one.agreeing} of {one.tokens} tokens"
    return f"{one.checkpoint} {one.dtype}: {agreeing}{parting}{logits}: {one.prompt!r}"


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", action="append", dest="prompts")
    parser.add_argument("--device", default="cuda", help="what is held against the CPU")
    parser.add_argument("--dtype", action="append", dest="dtypes", help="of the device; repeatable")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prompts = arguments.prompts or PROMPTS
    reference = load(arguments.checkpoints[0], device="cpu", dtype="float32", operator="dense")
    expected = {prompt: continued(reference, prompt, arguments.tokens) for prompt in prompts}
    found: list[Comparison] = []
    for folder in arguments.checkpoints:
        for dtype in arguments.dtypes or ("float16",):
            subject = load(folder, device=arguments.device, dtype=dtype)
            for number, prompt in enumerate(prompts):
                one = compare(subject, folder.name, prompt, expected[prompt], with_logits=number == 0)
                print(describe(one), file=sys.stderr, flush=True)
                found.append(one)
            del subject
    bounds = {
        dtype: max(one.largest_error for one in found if one.dtype == dtype and one.largest_error is not None)
        for dtype in {one.dtype for one in found}
    }
    wrong = [one for one in found if one.margin is not None and one.margin > 2 * bounds[one.dtype]]
    if arguments.json:
        print(json.dumps({"comparisons": [asdict(one) for one in found], "wrong": len(wrong)}))
        return bool(wrong)
    for reason in dict.fromkeys(one.step for one in found):
        print(f"steps: {reason}")
    return bool(wrong)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MarlinqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
