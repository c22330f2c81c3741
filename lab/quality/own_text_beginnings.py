"""Measures ``best`` where some documents of the model's own text continue pieces of calibration documents.

    python -m lab.quality.own_text_beginnings --share 0.5 [--steps N] row MODEL --row best ...

The rest of the command is that of worst_case.py. A share of 0 is the product's own text, which begins with
random tokens.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from lab.quality import worst_case
from marlinq.operations.quantize import own_text
from marlinq.operations.quantize.calibration_text import TextGatherer
from marlinq.runtime.writing import TextWriter

SHORTEST, LONGEST = 16, 64
"""tokens of a piece"""


class Continuing(TextWriter):
    """A writer of which a share of the rows begins with a piece of a calibration document."""

    share = 0.5
    documents: tuple[tuple[int, ...], ...] = ()

    def _plain_beginnings(self) -> list[tuple[int, ...]]:
        beginnings = super()._plain_beginnings()
        config = self._loaded.model.config.get_text_config()
        begin = config.bos_token_id
        for row, beginning in enumerate(beginnings):
            if int((row + 1) * self.share) == int(row * self.share):
                continue
            document = self.documents[self._below(len(self.documents))]
            length = min(SHORTEST + self._below(LONGEST - SHORTEST + 1), len(document))
            start = self._below(len(document) - length + 1)
            piece = document[start : start + length]
            first = beginning[:1] if len(beginning) == 2 and piece[0] != begin else ()
            beginnings[row] = (*first, *piece)
        return beginnings

    def _below(self, bound: int) -> int:
        return int(torch.randint(bound, (), generator=self._generator))


def main() -> None:
    """Changes the writer, then runs worst_case.py."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--steps", type=int)
    options, rest = parser.parse_known_args()
    Continuing.share = options.share
    gather = TextGatherer.gather

    def noting(self: TextGatherer, writer: Any) -> Any:
        Continuing.documents = tuple(document.tokens for document in self._text.documents)
        return gather(self, writer)

    if options.share:
        TextGatherer.gather = noting  # type: ignore[method-assign]
        own_text.TextWriter = Continuing  # type: ignore[attr-defined]
    if options.steps:
        worst_case.OURS["best"]["tune_steps"] = options.steps
    sys.argv = [sys.argv[0], *rest]
    worst_case.main()


if __name__ == "__main__":
    main()
