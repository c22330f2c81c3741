"""Calibration documents: drawn from a source of text with a seed, tokenised at natural length."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlinq.calibration.chat import Chat, render_chat
from marlinq.calibration.sources import Row, read_paragraphs
from marlinq.core import boundaries
from marlinq.core.errors import CheckpointError, UsageError

MIN_TOKENS = 16
"""Shorter documents (headings, blank fragments) are passed over: they hold no context worth measuring."""

_SPLIT = "train"


@dataclass(frozen=True)
class Document:
    """Token ids of one calibration document, at its natural length."""

    tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def documents_hash(documents: Sequence[Document]) -> str:
    """SHA-256 over the token ids of all documents in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps(document.tokens).encode() + b"\n")
    return digest.hexdigest()


def read_documents(
    source: str,
    *,
    tokenizer: Callable[[], Any],
    samples: int,
    max_length: int,
    seed: int,
    vocabulary: int,
) -> list[Document]:
    """``samples`` documents drawn at random from ``source``, each cut to ``max_length`` tokens.

    Args:
        source: as :mod:`marlinq.calibration.sources` spells it; of a dataset the split ``train``, unless it
            names another.
        tokenizer: makes the model's tokenizer; called when there is text to tokenise.
        samples: how many documents to draw; all of them, with a warning, when there are fewer.
        max_length: tokens that a document is cut to.
        seed: of the draw.
        vocabulary: number of token ids that the model knows.

    Raises:
        UsageError: the source is absent, of an unknown kind, or holds no usable document.
        EnvironmentProblem: the source is on the Hub, which can't be reached.
        UnsupportedError: the source holds chats, and the tokenizer has no chat template.
        CheckpointError: a token id is beyond the vocabulary, or the chat template fails.
    """
    # Some drawn documents turn out too short, so more are drawn than asked for.
    candidates = _draw(read_paragraphs(source, split=_SPLIT, seed=seed), 2 * samples + 16, seed)
    encoder: Any = None
    documents: list[Document] = []
    for row in candidates:
        if isinstance(row, list):
            tokens = row[:max_length]
        else:
            encoder = encoder or tokenizer()
            tokens = _encode(row, encoder, max_length, source)
        check_tokens(tokens, vocabulary, source)
        if len(tokens) >= min(MIN_TOKENS, max_length):
            documents.append(Document(tuple(tokens)))
        if len(documents) == samples:
            break
    if not documents:
        raise UsageError(f"text {source}: {len(candidates)} documents, none of {MIN_TOKENS} tokens or more")
    if len(documents) < samples:
        warnings.warn(
            f"text {source}: {len(documents)} usable documents, fewer than the {samples} asked for",
            stacklevel=2,
        )
    return documents


def check_tokens(tokens: Sequence[int], vocabulary: int, source: str) -> None:
    """Makes sure that the model knows all ``tokens``.

    Raises:
        CheckpointError: it does not.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        outside = min(tokens) if min(tokens) < 0 else max(tokens)
        raise CheckpointError(
            f"text {source}: token id {outside} is outside the model's vocabulary of {vocabulary}; "
            "the tokenizer belongs to another model"
        )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    with boundaries.tokenizer(folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _encode(row: str | Chat, tokenizer: Any, max_length: int, source: str) -> list[int]:
    if isinstance(row, Chat):
        # The template has written the special tokens.
        text, special = render_chat(row, tokenizer, source), False
    else:
        text, special = row, True
    with boundaries.tokenizer(tokenizer):
        encoded = tokenizer(text, truncation=True, max_length=max_length, add_special_tokens=special)
        ids: list[int] = encoded["input_ids"]
    return ids


def _draw(rows: Iterable[Row], count: int, seed: int) -> list[Row]:
    """A uniform sample in random order that never holds more than ``count`` rows (Vitter's algorithm R)."""
    generator = random.Random(seed)
    kept: list[Row] = []
    for index, row in enumerate(rows):
        if index < count:
            kept.append(row)
        elif (place := generator.randrange(index + 1)) < count:
            kept[place] = row
    generator.shuffle(kept)
    return kept
