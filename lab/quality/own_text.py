"""Writes the text that a model is tuned on, as a JSON list of documents of token ids.

    python lab/quality/own_text.py MODEL OUT --tokens 2400000

It is the text of ``marlinq quantize --quality best`` with another number of tokens, for tuning_settings.py.

Ran on one H200, CUDA 13.0, torch 2.11.0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from marlinq.checkpoint import Checkpoint
from marlinq.models import build_blueprint
from marlinq.operations.quantize import Recipe
from marlinq.operations.quantize.own_text import text_by_the_model


def main() -> None:
    """Write the text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    checkpoint = Checkpoint.open(options.model)
    documents = text_by_the_model(
        checkpoint,
        build_blueprint(checkpoint.config, source=str(options.model), tensors=checkpoint.tensors),
        Recipe(quality="best", tokens=options.tokens, max_length=512, seed=options.seed),
        torch.device(options.device),
        trust_remote_code=False,
        progress=lambda *_: None,
        message=print,
    )
    options.out.write_text(json.dumps([document.tokens for document in documents]), encoding="utf-8")


if __name__ == "__main__":
    main()
