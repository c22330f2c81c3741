"""How many tokens a second drafts of a head give that is right with a known chance.

    python lab/runtime/draft_speed.py FOLDER [--chances 0.9,0.8,0.7,0.5,0.0]

FOLDER is a checkpoint of one file with names like ``model.layers.0``. A copy of it gets a draft head of its
last block and random projections (``tests/testing/draft_heads.py``). It does its work, but its tokens are
replaced by those of the text without drafts, each right with the chance; so a line says what a head that good
would give. Each text is made twice, and the faster time counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from torch import Tensor

from marlinq.runtime import Generation, LoadedModel, generate, load
from marlinq.runtime.generation import Speculate
from marlinq.runtime.step.forward import DraftForward
from tests.testing.draft_heads import add_draft_head

PROMPT = "Once upon a time in a small village by the sea"
_WRONG = 1
"""token that stands for a wrong guess"""
_TAIL = 28
"""tokens by which the place in the text is found behind a pause of drafting"""


class KnownText(DraftForward):
    """A head that does the work of ``head`` and drafts the tokens of ``text``, each with ``chance``."""

    def __init__(self, head: DraftForward, text: Sequence[int], chance: float) -> None:
        self.head, self.text, self.chance, self.cost = head, list(text), chance, head.cost
        self._random = Random(0)
        self._place: int | None = None
        self._tokens: list[int] = []

    @property
    def known(self) -> int:  # type: ignore[override]
        return self.head.known

    def begin(self) -> None:
        self.head.begin()
        self._place = None

    def start(self, tokens: Sequence[int], hidden: Tensor, most: int) -> None:
        tokens = list(tokens)
        self._place = self._found(tokens) if self._place is None else self._place + len(tokens)
        self.head.start(tokens, hidden, most)
        ahead = self.text[self._place + 1 : self._place + 1 + most]
        ahead += [_WRONG] * (most - len(ahead))
        self._tokens = [token if self._random.random() < self.chance else _WRONG for token in ahead]

    def drafted(self) -> list[int]:
        self.head.drafted()
        return self._tokens

    def _found(self, tokens: list[int]) -> int:
        """Index in the text of the last of ``tokens``."""
        tail = tokens[-_TAIL:]
        ends = range(len(tail), len(self.text) + 1)
        return next(end - 1 for end in ends if self.text[end - len(tail) : end] == tail)


def replace_heads(loaded: LoadedModel, text: Sequence[int], chance: float) -> None:
    """Let the draft heads of all decoders of ``loaded`` draft ``text``."""
    for decoder in loaded.decoders._kept.values():
        drafter = decoder.forward.drafter
        if drafter is not None:
            head = drafter.head if isinstance(drafter, KnownText) else drafter
            decoder.forward.drafter = KnownText(head, text, chance)


def faster(loaded: LoadedModel, count: int, speculate: Speculate) -> Generation:
    """The faster of two texts of ``count`` tokens."""
    runs = [generate(loaded, PROMPT, max_new_tokens=count, speculate=speculate) for _ in range(2)]
    return max(runs, key=lambda each: each.tokens_per_second)


def measure(
    folder: Path, chances: Sequence[float], count: int, device: str
) -> list[tuple[float, Generation, float]]:
    """(chance, text with drafts, its tokens a second over those without drafts) for each of ``chances``."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(folder, Path(scratch, "model")))
        add_draft_head(copy, json.loads((copy / "config.json").read_text())["num_hidden_layers"] - 1, "mtp")
        loaded = load(copy, device=device, only_decodes=True)
        if loaded.tokenizer is None:
            raise SystemExit(f"{folder}: has no tokenizer")
        off = faster(loaded, count, "off")
        text = [*loaded.tokenizer(PROMPT)["input_ids"], *off.tokens]
        # Makes the decoder that the head belongs to.
        generate(loaded, PROMPT, max_new_tokens=count, speculate="mtp")
        rows = []
        for chance in chances:
            replace_heads(loaded, text, chance)
            found = faster(loaded, count, "auto")
            if found.tokens != off.tokens:
                raise SystemExit(f"chance {chance}: another text than without drafts")
            rows.append((chance, found, found.tokens_per_second / off.tokens_per_second))
        return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chances", default="0.9,0.8,0.7,0.5,0.0")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    chances = [float(each) for each in options.chances.split(",")]
    for chance, found, gain in measure(options.folder, chances, options.new_tokens, options.device):
        print(f"right with {chance}: {gain:.2f} times the tokens a second; {found.drafts}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
