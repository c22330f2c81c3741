"""Whether the GPU kernels continue prompts as a CPU does, token by token.

    python lab/quality/same_text.py CKPT --tokens 96

Both decode greedily, the CPU in float32 with the dequantised weights, the GPU through its kernels in float16.
Where they part, the CPU's logits of the two tokens tell a near tie from an error. Exits with 1 unless every
prompt's first 64 tokens agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from marlinq.core.errors import MarlinqError
from marlinq.runtime import generate, load
from marlinq.runtime.loading import LoadedModel

ENOUGH = 64
PROMPTS = (
    "The history of the lighthouse begins",
    "To bake a loaf of bread at home, first",
    "In mathematics, a prime number is",
    "Once upon a time, in a village by the sea,",
    "The main difference between a compiler and an interpreter is",
)


@dataclass(frozen=True)
class Comparison:
    """One prompt: how many tokens agree, and what the CPU thinks of the first two that don't."""

    prompt: str
    tokens: int
    agreeing: int
    margin: float | None
    text: str

    @property
    def passed(self) -> bool:
        """Whether enough tokens agree."""
        return self.agreeing >= ENOUGH


def compare(reference: LoadedModel, subject: LoadedModel, prompt: str, tokens: int) -> Comparison:
    """Continues ``prompt`` by both models."""
    expected = generate(reference, prompt, max_new_tokens=tokens)
    found = generate(subject, prompt, max_new_tokens=tokens)
    pairs = zip(expected.tokens, found.tokens, strict=False)
    agreeing = next((place for place, (a, b) in enumerate(pairs) if a != b), len(expected.tokens))
    margin = None
    if agreeing < min(len(expected.tokens), len(found.tokens)):
        ids = [*reference.tokenizer(prompt)["input_ids"], *expected.tokens[:agreeing]]
        with torch.no_grad():
            logits = reference.model(torch.tensor([ids])).logits[0, -1]
        margin = float(logits[expected.tokens[agreeing]] - logits[found.tokens[agreeing]])
    return Comparison(prompt, len(expected.tokens), agreeing, margin, expected.text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt", action="append", dest="prompts")
    parser.add_argument(
        "--device", default="cuda", help="what is held against the CPU, by the kernel's operator"
    )
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    reference = load(arguments.checkpoint, device="cpu", dtype="float32")
    subject = load(arguments.checkpoint, device=arguments.device, dtype=arguments.dtype, operator="w4a16")
    found = [compare(reference, subject, prompt, arguments.tokens) for prompt in arguments.prompts or PROMPTS]
    if arguments.json:
        print(json.dumps({"notes": subject.notes, "prompts": [asdict(one) for one in found]}))
    else:
        print("\n".join(subject.notes))
        for one in found:
            parting = "" if one.margin is None else f"; then tokens {one.margin:.4f} apart in logits"
            print(f"{one.agreeing} of {one.tokens} tokens agree{parting}: {one.prompt!r} {one.text!r}")
    return 0 if all(one.passed for one in found) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MarlinqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
