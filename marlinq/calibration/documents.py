"""Calibration documents: drawn at random from a source of text and tokenised."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from marlinq.calibration.chat import Chat, render_chat
from marlinq.calibration.images import encode_with_images, holds_images
from marlinq.calibration.sources import Row, Unusable, read_paragraphs
from marlinq.core import boundaries
from marlinq.core.display import counted
from marlinq.core.errors import CheckpointError, MarlinqError, UnsupportedError, UsageError
from marlinq.core.native_output import told_as_warning

if TYPE_CHECKING:
    from torch import Tensor

MIN_TOKENS = 16
"""tokens below which a document (a heading, a fragment) is left out, because it has too little context"""

_SPLIT = "train"
_MOST_CANDIDATES = 20_000
"""rows in memory for the draw, at most, where only the number of tokens is given"""
_AT_ONCE = 32
"""rows that are tokenised at a time; the tokenizer uses all cores for them"""
_MOST_UNUSABLE = 16
"""unusable rows at the start after which the source is refused; a template may take seconds per row"""
_NAMED = 3
"""unusable rows that a warning names"""


@dataclass(frozen=True)
class Document:
    """One calibration document.

    Attributes:
        tokens: token ids, at their natural length.
        beside: other inputs of the model by name, for a document with images; None for text alone.
    """

    tokens: tuple[int, ...]
    beside: Mapping[str, Tensor] | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)


def documents_hash(documents: Sequence[Document]) -> str:
    """SHA-256 over the token ids, and images, of all documents in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps(document.tokens).encode() + b"\n")
        for name, value in sorted((document.beside or {}).items()):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


class Duplicates:
    """Recognises repeated documents, over all sources.

    Two documents are the same if their texts differ only in white space and case, or if they have the same
    tokens after being cut.

    Attributes:
        found: number of repeated documents so far.
    """

    def __init__(self) -> None:
        self.found = 0
        self._seen: set[bytes] = set()

    def is_new(self, text: str | None, tokens: Sequence[int]) -> bool:
        """Whether no earlier document had this text or these tokens; remembers both."""
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
    template: str | None = None,
    duplicates: Duplicates | None = None,
    processor: Callable[[], Any] | None = None,
) -> list[Document]:
    """Different documents drawn at random from ``source``, each cut to ``max_length`` tokens.

    Conversations with images (:mod:`marlinq.calibration.images`) are taken whole or not at all. Unusable rows
    (without text, invalid JSON, messages that the chat template refuses, token ids beyond the vocabulary) are
    skipped with a warning; if all rows are unusable, an error is raised.

    Args:
        source: file or dataset, as :mod:`marlinq.calibration.sources` describes; a dataset's split is
            ``train`` unless ``source`` names another.
        tokenizer: function that makes the model's tokenizer; called only if there is text to tokenise.
        samples: number of documents to draw; if there are fewer, all are taken, with a warning. None for as
            many as ``tokens`` take.
        max_length: tokens that a document is cut to.
        seed: seed of the draw.
        vocabulary: number of token ids that the model knows.
        tokens: largest number of tokens of all documents; the last one is cut. None for no limit.
        as_messages: put every text into the model's chat template, as a user's message.
        template: as for :func:`render_chat`.
        duplicates: documents of other sources so far; the drawn documents are added.
        processor: function that makes the model's processor of images; called only if there are any. None
            skips rows with images.

    Raises:
        UsageError: the source does not exist, is of an unknown kind, or has no usable row.
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
    # More are drawn than asked for, because some turn out too short.
    wanted = min(-(-room // shortest), _MOST_CANDIDATES) if samples is None else samples
    candidates = _draw(read_paragraphs(source, split=_SPLIT, seed=seed), 2 * wanted + 16, seed)
    documents: list[Document] = []
    unusable: list[tuple[int, Unusable | MarlinqError]] = []
    usable = 0
    encoded = _encoded(
        candidates, tokenizer, processor, source, max_length, as_messages=as_messages, template=template
    )
    for number, text, ids in encoded:
        if text is None and isinstance(ids, list):
            ids = _known(ids, vocabulary, source)
        if isinstance(ids, Document):
            check_tokens(ids.tokens, vocabulary, source)
            usable += 1
            # Images tell documents apart that have the same words.
            if len(ids) <= room:
                documents.append(ids)
                room -= len(ids)
            if len(documents) == samples or room < shortest:
                break
            continue
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
        listed = "; ".join(f"row {number}: {_why(reason)}" for number, reason in unusable[:_NAMED])
        more = f"; and {len(unusable) - _NAMED} more" if len(unusable) > _NAMED else ""
        warnings.warn(
            f"text {source}: {len(unusable)} of {usable + len(unusable)} rows were skipped: {listed}{more}",
            stacklevel=2,
        )
    if not documents:
        raise UsageError(
            f"text {source}: {counted(len(candidates), 'documents')}, none of {MIN_TOKENS} tokens or more"
            f"{' that was not there before' if duplicates.found else ''}"
        )
    missing = ""
    if samples is not None and len(documents) < samples and room >= shortest:
        missing = f"{counted(len(documents), 'usable documents')}, fewer than the {samples} asked for"
    elif samples is None and tokens is not None and room >= shortest:
        missing = f"{counted(tokens - room, 'tokens')} in usable documents, fewer than the {tokens} asked for"
    if missing:
        warnings.warn(f"text {source}: {missing}", stacklevel=2)
    return documents


def _refuse_all(source: str, unusable: Sequence[tuple[int, Unusable | MarlinqError]]) -> NoReturn:
    """Raises the error for a source without usable rows, with the first row's reason."""
    number, problem = min(unusable, key=lambda each: each[0])
    if isinstance(problem, MarlinqError):
        raise problem
    raise UsageError(
        f"text {source}: none of {len(unusable)} rows can be used; row {number}: {problem.reason}"
    )


def _known(ids: list[int], vocabulary: int, source: str) -> list[int] | CheckpointError:
    """The token ids of a row, or the error if the model does not know all of them."""
    try:
        check_tokens(ids, vocabulary, source)
    except CheckpointError as error:
        return error
    return ids


def _why(problem: Unusable | MarlinqError) -> str:
    return problem.reason if isinstance(problem, Unusable) else str(problem).partition(": ")[2]


def check_tokens(tokens: Sequence[int], vocabulary: int, source: str) -> None:
    """Checks that all ``tokens`` are in the model's vocabulary.

    Raises:
        CheckpointError: one is not.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        outside = min(tokens) if min(tokens) < 0 else max(tokens)
        raise CheckpointError(
            f"text {source}: token id {outside} is outside the model's vocabulary of {vocabulary}; "
            "restore the model's own tokenizer, or token ids made with it"
        )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        CheckpointError: the folder has no tokenizer, or it can't be read.
    """
    from transformers import AutoTokenizer

    with boundaries.tokenizer(folder), told_as_warning(folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _encoded(
    rows: Sequence[tuple[int, Row | Unusable]],
    tokenizer: Callable[[], Any],
    processor: Callable[[], Any] | None,
    source: str,
    max_length: int,
    *,
    as_messages: bool,
    template: str | None,
) -> Iterator[tuple[int, str | None, list[int] | Document | Unusable | MarlinqError]]:
    """(number, text, token ids) of each row in turn, or why it has none; rows of token ids have no text, and
    one with images is a document."""
    encoder: Any = None
    reader: Any = None
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        texts: dict[int, str] = {}
        ids: dict[int, list[int] | Document | Unusable | MarlinqError] = {}
        chats = set()
        for place, (_, row) in enumerate(part):
            if isinstance(row, list | Unusable):
                ids[place] = row[:max_length] if isinstance(row, list) else row
                continue
            encoder = encoder or tokenizer()
            if isinstance(row, Chat) and holds_images(row):
                if processor is None:
                    ids[place] = Unusable("holds images; the model is run on text alone here")
                    continue
                try:
                    reader = reader or processor()
                    ids[place] = _with_images(row, encoder, reader, source, max_length, template)
                except UnsupportedError as error:
                    # The model reads no images: no other row with some is tried.
                    processor, ids[place] = None, error
                except CheckpointError as error:
                    ids[place] = error
                continue
            if as_messages and isinstance(row, str):
                row = Chat(({"role": "user", "content": row},))
            try:
                texts[place] = (
                    render_chat(row, encoder, source, template=template) if isinstance(row, Chat) else row
                )
            except CheckpointError as error:
                ids[place] = error
                continue
            if isinstance(row, Chat):
                chats.add(place)
        # No special tokens are added to rendered chats, whose template has written them.
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


def _with_images(
    row: Chat, tokenizer: Any, processor: Any, source: str, max_length: int, template: str | None
) -> Document | Unusable:
    encoded = encode_with_images(row, tokenizer, processor, source, template=template)
    if isinstance(encoded, Unusable):
        return encoded
    tokens, beside = encoded
    if len(tokens) > max_length:
        return Unusable(
            f"{counted(len(tokens), 'tokens')} with its images, more than --max-length {max_length}"
        )
    return Document(tuple(tokens), beside)


def _draw(rows: Iterable[Row | Unusable], count: int, seed: int) -> list[tuple[int, Row | Unusable]]:
    """A uniform sample of ``count`` rows in random order, each with its number from 1 on; at most ``count``
    rows are in memory (Vitter's algorithm R)."""
    generator = random.Random(seed)
    kept: list[tuple[int, Row | Unusable]] = []
    for index, row in enumerate(rows):
        if index < count:
            kept.append((index + 1, row))
        elif (place := generator.randrange(index + 1)) < count:
            kept[place] = (index + 1, row)
    generator.shuffle(kept)
    return kept
