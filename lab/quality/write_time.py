"""How long a model takes to write its own calibration text, and whether it was foretold.

    python lab/quality/write_time.py FOLDER [--layers 32]      # a random checkpoint of Llama 3's shape
    python lab/quality/write_time.py FOLDER --model MODEL [--tokens 786000]

Loads and writes as ``marlinq quantize MODEL OUT`` does before its first block. Prints the seconds of each
part, a step's time behind several lengths of text, and the rounds it took. A random checkpoint never ends a
document.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from random_checkpoint import write_original

from marlinq.checkpoint import Checkpoint
from marlinq.models import build_blueprint
from marlinq.operations.quantize import Recipe, text
from marlinq.runtime.writing import TextWriter


def main() -> None:
    """Write what is missing, load, write, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="instead of a random checkpoint")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, help="as the command's option")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    model = arguments.model or arguments.folder / f"original-{arguments.layers}"
    if not model.exists():
        unfinished = model.with_suffix(".unfinished")
        write_original(unfinished, layers=arguments.layers)
        unfinished.rename(model)
    start = time.monotonic()

    def say(message: str) -> None:
        print(f"{time.monotonic() - start:7.2f} s: {message}", flush=True)

    probe, write, load = TextWriter.seconds_a_step, TextWriter.write, text._loaded

    def loaded(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        say("the model is on the device")
        return found

    def probed(self: TextWriter, behind: int = 2) -> float:
        seconds = probe(self, behind)
        say(f"a step behind {behind:5d} tokens: {1e3 * seconds:.3f} ms")
        return seconds

    def written(self: TextWriter, **kwargs: Any) -> Any:
        for quarter in (1, 2, 3):
            probed(self, quarter * (self._max_length - 4) // 4)
        result = write(self, **kwargs)
        lengths = sorted(map(len, result.documents))
        say(f"{result.rounds} rounds; documents of {lengths[0]} to {lengths[-1]} tokens")
        return result

    text._loaded, TextWriter.seconds_a_step, TextWriter.write = loaded, probed, written  # type: ignore
    checkpoint = Checkpoint.open(model)
    blueprint = build_blueprint(checkpoint.config, source=str(model), tensors=checkpoint.tensors)
    recipe = Recipe() if arguments.tokens is None else Recipe(tokens=arguments.tokens)
    text.text_by_the_model(
        checkpoint,
        blueprint,
        recipe,
        torch.device(arguments.device),
        trust_remote_code=False,
        progress=lambda *_: None,
        message=say,
    )
    say("all of it")


if __name__ == "__main__":
    main()
