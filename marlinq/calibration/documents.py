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
from typing import Any, NoReturn

from marlinq.calibration.chat import Chat, render_chat
from marlinq.calibration.sources import Row, Unusable, read_paragraphs
from marlinq.core import boundaries
from marlinq.core.errors import CheckpointError, MarlinqError, UsageError

MIN_TOKENS = 16
"""Shorter documents (headings, blank fragments) are passed over: they hold no context worth measuring."""

_SPLIT = "train"
# Rows that are held at a time for the draw, where only the number of tokens is known.
_MOST_CANDIDATES = 20_000
# Rows that are tokenised together: the tokenizer shares them out among the processor's cores.
_AT_ONCE = 32
# Unusable rows before the first usable one after which no more are tried: a template may take seconds a row.
_MOST_UNUSABLE = 16
# Unusable rows that a warning names.
_NAMED = 3


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

    Rows that can't be used (no text, no JSON, messages that the chat template refuses, token ids beyond the
    vocabulary) are skipped, with a warning that counts and names them, unless all are of that kind.

    Args:
        source: as :mod:`marlinq.calibration.sources` spells it; of a dataset the split ``train``, unless it
            names another.
        tokenizer: makes the model's tokenizer; called when there is text to tokenise.
        samples: how many documents to draw; all of them, with a warning, when there are fewer. None for as
            many as ``tokens`` take.
        max_length: tokens that a document is cut to.
        seed: seed of the draw.
        vocabulary: number of token ids that the model knows.
        tokens: number of tokens of all documents together, at most; the last is cut. None for no bound.
        as_messages: put every text into the model's chat template, as a user's message.
        duplicates: knows the documents of other sources, and learns these.

    Raises:
        UsageError: the source is absent, of an unknown kind, or holds no usable document or row.
        EnvironmentProblem: the source is on the Hub, which can't be reached.
        UnsupportedError: the source holds chats, and the tokenizer has no chat template.
        CheckpointError: a token id of tokenised text is beyond the vocabulary, or the chat template fails on
            every row.
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
    unusable: list[tuple[int, Unusable | MarlinqError]] = []
    usable = 0
    for number, text, ids in _encoded(candidates, tokenizer, source, max_length, as_messages=as_messages):
        if text is None and isinstance(ids, list):
            ids = _known(ids, vocabulary, source)
        if not isinstance(ids, list):
            unusable.append((number, ids))
            if not usable and len(unusable) == min(_MOST_UNUSABLE, len(candidates)):
                _refuse_all(source, unusable)
            continue
        check_tokens(ids, vocabulary, source)
        usable += 1
        if len(ids) >= shortest and duplicates.is_new(text, ids):
            documents.append(Document(tuple(ids[:room])))
            room -= len(documents[-1])
        if len(documents) == samples or room < shortest:
            break
    if unusable:
        listed = "; ".join(f"row {number}: {_why(found)}" for number, found in unusable[:_NAMED])
        more = f"; and {len(unusable) - _NAMED} more" if len(unusable) > _NAMED else ""
        warnings.warn(
            f"text {source}: {len(unusable)} of {usable + len(unusable)} rows were skipped: {listed}{more}",
            stacklevel=2,
        )
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


def _refuse_all(source: str, unusable: Sequence[tuple[int, Unusable | MarlinqError]]) -> NoReturn:
    """Say why no row can be used, by the first."""
    number, found = min(unusable, key=lambda each: each[0])
    if isinstance(found, MarlinqError):
        raise found
    raise UsageError(f"text {source}: none of {len(unusable)} rows can be used; row {number}: {found.reason}")


def _known(ids: list[int], vocabulary: int, source: str) -> list[int] | CheckpointError:
    """A row's own token ids, or why the model does not know them all."""
    try:
        check_tokens(ids, vocabulary, source)
    except CheckpointError as error:
        return error
    return ids


def _why(found: Unusable | MarlinqError) -> str:
    return found.reason if isinstance(found, Unusable) else str(found).partition(": ")[2]


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
    rows: Sequence[tuple[int, Row | Unusable]],
    tokenizer: Callable[[], Any],
    source: str,
    max_length: int,
    *,
    as_messages: bool,
) -> Iterator[tuple[int, str | None, list[int] | Unusable | MarlinqError]]:
    """Number, text and token ids of each row, as far as they are asked for, or why it has none; a row of ids
    has no text."""
    encoder: Any = None
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        texts: dict[int, str] = {}
        ids: dict[int, list[int] | Unusable | MarlinqError] = {}
        chats = set()
        for place, (_, row) in enumerate(part):
            if isinstance(row, list | Unusable):
                ids[place] = row[:max_length] if isinstance(row, list) else row
                continue
            encoder = encoder or tokenizer()
            if as_messages and isinstance(row, str):
                row = Chat(({"role": "user", "content": row},))
            try:
                texts[place] = render_chat(row, encoder, source) if isinstance(row, Chat) else row
            except CheckpointError as error:
                ids[place] = error
                continue
            if isinstance(row, Chat):
                chats.add(place)
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
        for place, (number, _) in enumerate(part):
            yield number, texts.get(place), ids[place]


def _draw(rows: Iterable[Row | Unusable], count: int, seed: int) -> list[tuple[int, Row | Unusable]]:
    """A uniform sample in random order that never holds more than ``count`` rows (Vitter's algorithm R), each
    with its number from 1 on."""
    generator = random.Random(seed)
    kept: list[tuple[int, Row | Unusable]] = []
    for index, row in enumerate(rows):
        if index < count:
            kept.append((index + 1, row))
        elif (place := generator.randrange(index + 1)) < count:
            kept[place] = (index + 1, row)
    generator.shuffle(kept)
    return kept
