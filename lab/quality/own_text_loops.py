"""Tells how much of the text that a model writes is loops, and how predictable the text is.

    python -m lab.quality.own_text_loops MODEL --text FILE [--tokens 8192 --top-k 0 --device cpu]

Prints, for the model's own text with loops, for the same without them, and for the file's, the number of
documents and tokens and the mean entropy of the model's predictions in the first 4,096 tokens, in nats.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from marlinq.calibration import Document, read_documents
from marlinq.operations.quantize.own_text import mean_entropy
from marlinq.runtime import LoadedModel, load, writing
from marlinq.runtime.writing import TextWriter

LENGTH = 512
ROWS = 32
SAMPLES = 64


def write(loaded: LoadedModel, tokens: int, top_k: int) -> Sequence[tuple[int, ...]]:
    """Text that does not end where the model begins to repeat itself."""
    usual, writing._REPEATED = writing._REPEATED, tokens
    writer = TextWriter(loaded, rows=ROWS, max_length=LENGTH, seed=0, top_k=top_k)
    try:
        return writer.write(tokens=tokens).documents
    finally:
        writer.close()
        writing._REPEATED = usual


def before_loop(document: tuple[int, ...]) -> tuple[int, ...]:
    """The document up to its first loop; the model did not write the first two tokens."""
    row = writing._Row(list(document[:2]), 2)
    for token in document[2:]:
        row.tokens.append(token)
        if row.end_loop():
            break
    return tuple(row.tokens)


def main() -> None:
    """Writes and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    loaded = load(options.model, device=options.device, dtype="bfloat16")
    own = write(loaded, options.tokens, options.top_k)
    cut = [before_loop(document) for document in own]
    given: Sequence[Document] = read_documents(
        str(options.text),
        tokenizer=lambda: loaded.tokenizer,
        samples=SAMPLES,
        tokens=options.tokens,
        max_length=LENGTH,
        seed=0,
        vocabulary=loaded.model.config.get_text_config().vocab_size,
    )
    rows = {
        "its own": own,
        f"its own, {sum(len(a) < len(b) for a, b in zip(cut, own, strict=True))} loops left out": cut,
        options.text.name: [document.tokens for document in given],
    }
    for name, documents in rows.items():
        print(
            f"{name}: {len(documents)} documents, {sum(map(len, documents))} tokens, "
            f"{mean_entropy(loaded, documents, LENGTH):.2f} nats a token",
            flush=True,
        )


if __name__ == "__main__":
    main()
