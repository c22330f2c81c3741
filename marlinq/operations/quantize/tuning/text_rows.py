"""The text that tuning learns from: held-out documents, rows of one length, and tokens drawn anew."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marlinq.calibration import Document
from marlinq.operations.quantize.drawing import draw

_PIECE = 32
"""tokens per piece of a document, at least; rows are made of pieces"""
_HELD_OUT = 16
"""documents of which one is held out"""
_MOST_HELD_OUT = 64
"""documents that are held out, at most"""
_FEWEST = 8
"""documents of which at least one is held out; of fewer none is"""
REDRAWN = 0.3
"""probability that a token of repeated text is drawn anew from the original's predictions"""
NOISE = 0.1
"""probability that a token of repeated text is replaced by a random one, where the model has written none of
the text: its own text has rare tokens, a few documents don't"""


def hold_out(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(documents to learn from, held-out documents).

    Every sixteenth document is held out, or fewer where that would be more than 64; documents are in random
    order. Copies of a document stay on one side.
    """
    if len(documents) < _FEWEST:
        return list(documents), []
    step = max(_HELD_OUT, -(-len(documents) // _MOST_HELD_OUT))
    held_out = set(documents[_FEWEST - 1 :: step])
    learning = [each for each in documents if each not in held_out]
    return (learning, [each for each in documents if each in held_out]) if learning else (list(documents), [])


def random_rows(
    documents: Sequence[Document], length: int, places: int, tokens: int, seed: int
) -> list[Document]:
    """Rows of ``length`` tokens, ``tokens`` in all, made of random pieces of documents.

    Tuning would overfit a few documents. In new contexts their tokens have other meanings, so that the same
    text teaches more, and rows of one length need no padding. All of the text comes once before any of it is
    repeated, cut and mixed differently. If there is more than one micro-batch of ``places`` tokens, the
    number of rows fills all of them. Where documents begin with the same token, so do rows
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
    first, every = _beginning(documents, length)
    rows, start = [], 0
    for number in range(count):
        begin = first if number % every == 0 else ()
        stop = start + length - len(begin)
        rows.append(Document((*begin, *text[start:stop])))
        start = stop
    return rows


def new_rows(documents: Sequence[Document], length: int) -> int:
    """Number of the first rows of :func:`random_rows` without repeated text."""
    first, every = _beginning(documents, length)
    total = sum(map(len, documents))
    count = total // length
    while (count + 1) * length - len(first) * -(-(count + 1) // every) <= total:
        count += 1
    return count


def _beginning(documents: Sequence[Document], length: int) -> tuple[tuple[int, ...], int]:
    """(first token of rows, n), where every nth row begins with this token; an empty tuple where none does.

    Attention treats a text's first token specially (attention sinks). If all documents begin with one token,
    as with tokenizers that add a start token, every row does. If more than half do, as in a mix of the
    model's own text with files, every other row does. Else no row does; nor do rows of one token, which would
    hold nothing else.
    """
    token, count = Counter(document.tokens[0] for document in documents).most_common(1)[0]
    if length == 1 or 2 * count <= len(documents):
        return (), 1
    return (token,), 1 if count == len(documents) else 2


def _pieces(document: Document, length: int, generator: random.Random) -> list[tuple[int, ...]]:
    """A document cut at random into pieces of 32 to ``length`` tokens; a shorter rest is added to the last
    piece."""
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
    """``ids`` with some tokens drawn anew from the model's predictions after the original preceding tokens.

    Args:
        ids: int64 [B, T], on the device of ``generator``.
        hidden: [B, T, H], output of the model's last block for ``ids``.
        logits: function from hidden states [rows, H] to logits [rows, vocabulary].
        share: probability that a token is drawn anew; the first of a row never is.
        noise: probability that a token is then replaced by a uniformly random one.
        chunk: rows whose logits are in memory at once.
        generator: random generator for all draws.

    Returns:
        int64 [B, T]
    """
    if ids.shape[1] == 1:
        return ids
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
