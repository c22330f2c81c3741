"""Writes the texts that quality is measured on, except novels, as plain files.

    python lab/quality/evaluation_texts.py MODEL OUT --calibration FILE --seed 0 --seed 1 --seed 2

OUT/c4.txt has the documents of FILE that no run with these seeds calibrates on, OUT/docs.txt this
documentation, and OUT/source.txt every twentieth file of this package. No GPU is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from marlinq.calibration import load_tokenizer, read_documents
from marlinq.calibration.sources import read_paragraphs
from marlinq.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[2]
EVERY = 20


def main() -> None:
    """Write the three files."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.model)
    vocabulary = Checkpoint.open(options.model).config["vocab_size"]
    drawn = {
        document.tokens
        for seed in options.seeds
        for document in read_documents(
            str(options.calibration),
            tokenizer=lambda: tokenizer,
            samples=options.samples,
            max_length=options.max_length,
            seed=seed,
            vocabulary=vocabulary,
        )
    }
    # Cut to the length that calibration cuts drawn documents to, so that they can be compared.
    paragraphs = [str(row) for row in read_paragraphs(str(options.calibration), split="train", seed=0)]
    encoded = tokenizer(paragraphs, add_special_tokens=False, truncation=True, max_length=options.max_length)
    kept = [
        text
        for text, ids in zip(paragraphs, encoded["input_ids"], strict=True)
        if tuple(ids[: options.max_length]) not in drawn
    ]
    texts = {
        "c4": kept,
        "docs": [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))],
        "source": [
            path.read_text(encoding="utf-8") for path in sorted((ROOT / "marlinq").rglob("*.py"))[::EVERY]
        ],
    }
    for name, parts in texts.items():
        (options.out / f"{name}.txt").write_text("\n\n".join(parts), encoding="utf-8")
        print(f"{name}: {len(parts)} parts, {sum(map(len, parts)):,} characters")
    print(
        f"{len(paragraphs) - len(kept)} documents of {options.calibration.name} left out, {len(drawn)} drawn"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--calibration", type=Path, required=True, help="text that runs calibrate on")
    parser.add_argument("--seed", dest="seeds", type=int, action="append", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()
