"""The text that is learnt from: what is held out of it, its rows, and tokens that are drawn anew."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marlinq.calibration import Document
from marlinq.operations.quantize.drawing import draw

# A row is put together from pieces of documents of at least this many tokens.
_PIECE = 32
# One document in _HELD_OUT is held out, at least one and at most _MOST_HELD_OUT; none of fewer than _FEWEST.
_HELD_OUT = 16
_MOST_HELD_OUT = 64
_FEWEST = 8
# The chance of a token to be drawn anew in text that was there before.
REDRAWN = 0.3
# The chance of a token of such text to become any token, where the model has written none of the text: what
# it writes itself has rare tokens in it, a few documents have not.
NOISE = 0.1


def hold_out(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Documents to learn from, and those that tell whether that helped: every sixteenth, as they were drawn
    at random, of many documents fewer. A document that is there twice is on one side only."""
    if len(documents) < _FEWEST:
        return list(documents), []
    step = max(_HELD_OUT, -(-len(documents) // _MOST_HELD_OUT))
    held_out = set(documents[_FEWEST - 1 :: step])
    learning = [each for each in documents if each not in held_out]
    return (learning, [each for each in documents if each in held_out]) if learning else (list(documents), [])


def random_rows(
    documents: Sequence[Document], length: int, places: int, tokens: int, seed: int
) -> list[Document]:
    """Rows of ``length`` tokens, ``tokens`` in all, of random pieces of documents.

    Few documents would be learnt by heart. In ever new neighbourhoods their tokens mean something else, so
    the same text teaches more; and equal rows need no padding. All of the text comes before any of it comes
    again, cut and mixed anew. Rows fill their micro-batches of ``places``, if there are more than one, so
    that no step takes two where one holds enough. Where documents begin alike, so do rows
    (:func:`_beginning`).
    """
    generator = random.Random(seed)
    count = max(1, tokens // length)
    full = max(1, places // length)
    count = count - count % full if count > full else count
    text: list[int] = []
    while len(text) < count * length:
        pieces = [piece for document in documents for piece in _pieces(document, length, generator)]
        generator.shuffle(pieces)
        for piece in pieces:
            text += piece
    first, every = _beginning(documents)
    rows, start = [], 0
    for number in range(count):
        begin = first if number % every == 0 else ()
        stop = start + length - len(begin)
        rows.append(Document((*begin, *text[start:stop])))
        start = stop
    return rows


def new_rows(documents: Sequence[Document], length: int) -> int:
    """How many of :func:`random_rows` hold text that comes for the first time, none that comes again."""
    first, every = _beginning(documents)
    total = sum(map(len, documents))
    count = total // length
    while (count + 1) * length - len(first) * -(-(count + 1) // every) <= total:
        count += 1
    return count


def _beginning(documents: Sequence[Document]) -> tuple[tuple[int, ...], int]:
    """The token that rows begin with, and that one row in how many does.

    Attention rests on a text's first token. Where that is the same in every text that the model will see, as
    with tokenizers that add one, it has to be in every row; where only most documents begin with it, as with
    what a model writes beside text from outside, in every other row. Else there is none.
    """
    token, count = Counter(document.tokens[0] for document in documents).most_common(1)[0]
    if 2 * count <= len(documents):
        return (), 1
    return (token,), 1 if count == len(documents) else 2


def _pieces(document: Document, length: int, generator: random.Random) -> list[tuple[int, ...]]:
    """A document cut at random into pieces of at most ``length`` tokens, but for a rest too short to stand
    alone."""
    pieces, start = [], 0
    while start < len(document):
        end = start + generator.randint(_PIECE, max(_PIECE, length))
        if len(document) - end < _PIECE:
            end = len(document)
        pieces.append(tuple(document.tokens[start:end]))
        start = end
    return pieces


def redraw(
    ids: Tensor,
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
    *,
    share: float,
    noise: float,
    chunk: int,
    generator: torch.Generator,
) -> Tensor:
    """Text some of whose tokens the model has drawn anew, each behind the tokens that stood before it.

    Args:
        ids: int64 [B, T], on the device of ``generator``.
        hidden: [B, T, H], what the model's last block makes of ``ids``.
        logits: hidden states [rows, H] to logits [rows, vocabulary].
        share: the chance of a token to be drawn; the first of a row stays.
        noise: the chance of a token to become any of the vocabulary after that, each as likely.
        chunk: rows whose logits are held at once.
        generator: generator of all that is drawn.

    Returns:
        int64 [B, T]
    """
    rows = hidden[:, :-1].flatten(0, 1)
    drawn = []
    with torch.no_grad():
        for start in range(0, len(rows), chunk):
            likely = logits(rows[start : start + chunk]).float().softmax(-1)
            drawn.append(draw(likely, generator))
    anew = torch.rand(ids[:, 1:].shape, generator=generator, device=ids.device) < share
    rest = torch.where(anew, torch.cat(drawn).view_as(ids[:, 1:]), ids[:, 1:])
    if noise:
        anything = torch.randint(likely.shape[-1], rest.shape, generator=generator, device=ids.device)
        stray = torch.rand(rest.shape, generator=generator, device=ids.device) < noise
        rest = torch.where(stray, anything, rest)
    return torch.cat([ids[:, :1], rest], dim=1)
