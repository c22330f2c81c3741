"""Rows of pieces of documents, some of their tokens drawn anew by the original, for tuning_settings.py.

    python lab/quality/redrawn_text.py MODEL TOKENS OUT --tokens 3000000 --share 0.3

TOKENS and OUT are JSON lists of documents of token ids; quality_peers.py writes the first. As tuning does
with text that comes again, but with all of it, from the first time on, with the held-out documents left out,
and in one pass or several (``--rounds``).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlinq import load
from marlinq.calibration import Document
from marlinq.operations.quantize.tuning.rows import REDRAWN, hold_out, random_rows, redraw

ROW = 512
ROWS_AT_ONCE = 32


def main() -> None:
    """Draw the text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("documents", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--share", type=float, default=REDRAWN)
    parser.add_argument("--noise", type=float, default=0.0, help="chance of a token to become any token")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    begun = time.perf_counter()
    given = json.loads(options.documents.read_text(encoding="utf-8"))
    learning, _ = hold_out([Document(tuple(tokens)) for tokens in given])
    rows = random_rows(learning, ROW, ROW, options.tokens, options.seed)
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    model: Any = load(options.model, device=options.device, dtype=dtype).model
    generator = torch.Generator(options.device).manual_seed(options.seed)
    head = model.get_output_embeddings()

    def logits(hidden: Tensor) -> Tensor:
        found: Tensor = head(hidden)
        return found

    out: list[list[int]] = []
    with torch.no_grad():
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            ids = torch.tensor([row.tokens for row in some], device=options.device)
            for number in range(options.rounds):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                ids = redraw(
                    ids,
                    hidden,
                    logits,
                    share=options.share,
                    noise=options.noise if number + 1 == options.rounds else 0.0,
                    chunk=8192,
                    generator=generator,
                )
            out += ids.tolist()
    options.out.write_text(json.dumps(out), encoding="utf-8")
    print(f"{len(out)} rows in {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
