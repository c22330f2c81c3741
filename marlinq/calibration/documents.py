"""Calibration documents: drawn from a source of text with a seed, tokenised at natural length."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
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
# Rows that are held at a time for the draw, where only the number of tokens is known.
_MOST_CANDIDATES = 20_000
# Rows that are tokenised together: the tokenizer shares them out among the processor's cores.
_AT_ONCE = 32


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


class Duplicates:
    """Tells documents that were there before, whatever source they came from.

    Two are the same when their texts differ in white space and case only, or when what is left of them after
    the cut has the same tokens.

    Attributes:
        found: how many there were.
    """

    def __init__(self) -> None:
        self.found = 0
        self._seen: set[bytes] = set()

    def is_new(self, text: str | None, tokens: Sequence[int]) -> bool:
        """Whether no document before had this text or these tokens; it counts from now on."""
        keys = {hashlib.sha256(array("q", tokens).tobytes()).digest()}
        if text is not None:
            words = " ".join(text.casefold().split())
            keys.add(hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest())
        new = not keys & self._seen
        self._seen |= keys
        self.found += not new
        return new


def read_documents(
    source: str,
    *,
    tokenizer: Callable[[], Any],
    samples: int | None,
    max_length: int,
    seed: int,
    vocabulary: int,
    tokens: int | None = None,
    as_messages: bool = False,
    duplicates: Duplicates | None = None,
) -> list[Document]:
    """Different documents drawn at random from ``source``, each cut to ``max_length`` tokens.

    Args:
        source: as :mod:`marlinq.calibration.sources` spells it; of a dataset the split ``train``, unless it
            names another.
        tokenizer: makes the model's tokenizer; called when there is text to tokenise.
        samples: how many documents to draw; all of them, with a warning, when there are fewer. None for as
            many as ``tokens`` take.
        max_length: tokens that a document is cut to.
        seed: of the draw.
        vocabulary: number of token ids that the model knows.
        tokens: of all documents together, at most; the last is cut. None for no bound.
        as_messages: put every text into the model's chat template, as a user's message.
        duplicates: knows the documents of other sources, and learns these.

    Raises:
        UsageError: the source is absent, of an unknown kind, or holds no usable document.
        EnvironmentProblem: the source is on the Hub, which can't be reached.
        UnsupportedError: the source holds chats, and the tokenizer has no chat template.
        CheckpointError: a token id is beyond the vocabulary, or the chat template fails.
    """
    if samples is None and tokens is None:
        raise ValueError("read_documents: expected samples or tokens")
    duplicates = duplicates or Duplicates()
    shortest = min(MIN_TOKENS, max_length)
    room = tokens if tokens is not None else (samples or 0) * max_length
    # Some drawn documents turn out too short, so more are drawn than asked for.
    wanted = min(-(-room // shortest), _MOST_CANDIDATES) if samples is None else samples
    candidates = _draw(read_paragraphs(source, split=_SPLIT, seed=seed), 2 * wanted + 16, seed)
    documents: list[Document] = []
    for text, ids in _encoded(candidates, tokenizer, source, max_length, as_messages=as_messages):
        check_tokens(ids, vocabulary, source)
        if len(ids) >= shortest and duplicates.is_new(text, ids):
            documents.append(Document(tuple(ids[:room])))
            room -= len(documents[-1])
        if len(documents) == samples or room < shortest:
            break
    if not documents:
        raise UsageError(
            f"text {source}: {len(candidates)} documents, none of {MIN_TOKENS} tokens or more that was not "
            "there before"
            if duplicates.found
            else f"text {source}: {len(candidates)} documents, none of {MIN_TOKENS} tokens or more"
        )
    missing = ""
    if samples is not None and len(documents) < samples and room >= shortest:
        missing = f"{len(documents)} usable documents, fewer than the {samples} asked for"
    elif samples is None and tokens is not None and room >= shortest:
        missing = f"{tokens - room} tokens in usable documents, fewer than the {tokens} asked for"
    if missing:
        warnings.warn(f"text {source}: {missing}", stacklevel=2)
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


def _encoded(
    rows: Sequence[Row], tokenizer: Callable[[], Any], source: str, max_length: int, *, as_messages: bool
) -> Iterator[tuple[str | None, list[int]]]:
    """Text and token ids of each row, as far as they are asked for; a row of ids has no text."""
    encoder: Any = None
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        texts: dict[int, str] = {}
        chats = set()
        for place, row in enumerate(part):
            if isinstance(row, list):
                continue
            encoder = encoder or tokenizer()
            if as_messages and isinstance(row, str):
                row = Chat(({"role": "user", "content": row},))
            if isinstance(row, Chat):
                chats.add(place)
            texts[place] = render_chat(row, encoder, source) if isinstance(row, Chat) else row
        ids = {place: row[:max_length] for place, row in enumerate(part) if isinstance(row, list)}
        # A chat template has written its special tokens already.
        for special, places in ((True, sorted(texts.keys() - chats)), (False, sorted(chats))):
            if places:
                with boundaries.tokenizer(encoder):
                    encoded = encoder(
                        [texts[place] for place in places],
                        truncation=True,
                        max_length=max_length,
                        add_special_tokens=special,
                    )
                    ids |= zip(places, encoded["input_ids"], strict=True)
        for place in range(len(part)):
            yield texts.get(place), ids[place]


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
