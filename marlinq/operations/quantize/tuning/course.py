"""The text that is learnt from, in rounds: at a time as much of it as there is room for what the original
makes of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from marlinq.calibration import Batch, Document, make_batches
from marlinq.core.progress import ReportProgress
from marlinq.models import BlockReplay, ModelInstance
from marlinq.operations.quantize.tuning.loop import Round, TuningSettings, logits_at_once
from marlinq.operations.quantize.tuning.teacher import Lesson, learn, redraw

# Places of a micro-batch, padding included; a step takes as many as its tokens need.
PLACES = {"cpu": 1024, "cuda": 8192}
# Tokens of a row of text.
ROW = 512
# A row is put together from pieces of documents of at least this many tokens.
_PIECE = 32
# The chance of a token to be drawn anew in text that was there before.
_REDRAWN = 0.3


@dataclass(frozen=True)
class Room:
    """What the original's hidden states may take.

    Attributes:
        tokens: of a round, at most.
        device_bytes: of what enters the blocks, and of what leaves them, on the device.
        folder: where they go that host memory has no room for.
    """

    tokens: int
    device_bytes: int
    folder: Path


class Course:
    """What every step learns from. Each has rows of its own: no row comes twice.

    Args:
        instance: the original, nothing materialised, nor is between two rounds.
        learning: the text.
        held_out: documents that every round has besides, as they are; may be empty.
        settings: how many steps, of how many tokens.
        room: what the original's hidden states may take.
        max_length: tokens that a row may have.
        progress: told about the blocks that the original has run.

    Attributes:
        replay: of the instance; it holds the calls of the round that was last made.
    """

    def __init__(
        self,
        instance: ModelInstance,
        learning: Sequence[Document],
        held_out: Sequence[Document],
        settings: TuningSettings,
        room: Room,
        *,
        max_length: int,
        progress: ReportProgress,
    ) -> None:
        self._instance, self._settings, self._room, self._progress = instance, settings, room, progress
        self.replay = BlockReplay(instance)
        places = PLACES[instance.device.type]
        self._length = min(ROW, max_length)
        # All micro-batches are alike, and hold together no fewer tokens than a step is to have.
        rows = -(-settings.tokens // self._length)
        self._batches = -(-rows // max(1, places // self._length))
        self._rows = -(-rows // self._batches)
        a_step = self._batches * self._rows * self._length
        rounds = -(-settings.steps // max(1, room.tokens // a_step))
        self._steps = -(-settings.steps // rounds)
        self._text = rows_of(learning, self._length, settings.seed)
        self._new = sum(map(len, learning)) // self._length
        self._drawn = 0
        routed = instance.blueprint.routed
        self._watched = make_batches(held_out, token_budget=places, pad=not routed) if held_out else []

    def rounds_from(self, step: int) -> range:
        """The numbers of the rounds that ``step`` and those behind it belong to."""
        return range(step // self._steps, -(-self._settings.steps // self._steps))

    def round(self, number: int) -> Round:
        """A round, no earlier one than the last that was made.

        Raises:
            NumericsError: the original's hidden states hold NaN or infinity.
        """
        steps = range(number * self._steps, min((number + 1) * self._steps, self._settings.steps))
        a_step = self._batches * self._rows
        first = steps.start * a_step
        rows = list(islice(self._text, first - self._drawn, first - self._drawn + len(steps) * a_step))
        self._drawn = first + len(rows)
        batches = make_batches(rows, token_budget=self._rows * self._length)
        batches = self._varied(batches, max(0, self._new - first), self._settings.seed + number)
        lesson = self._learn([*batches, *self._watched], "running the original")
        return Round(lesson, steps, self._batches)

    def _varied(self, batches: list[Batch], new: int, seed: int) -> list[Batch]:
        """The batches; behind the first ``new`` rows their text was there before, and the original draws some
        tokens anew.

        A few documents are learnt by heart otherwise. What the original draws is near to them, and never the
        same.
        """
        whole, rest = divmod(new, self._rows)
        again = batches[whole:]
        if not again:
            return batches
        lesson = self._learn(again, "varying the text")
        device = self._instance.device
        generator = torch.Generator(device).manual_seed(seed)
        varied = []
        with self._instance.outer(whole=True), self._instance.head() as head:
            for number, batch in enumerate(again):
                ids = batch.ids.to(device)
                drawn = redraw(
                    ids,
                    lesson.last.load(number),
                    lambda x: self.replay.logits(x, head),
                    share=_REDRAWN,
                    chunk=logits_at_once(self._instance.blueprint.config, device),
                    generator=generator,
                )
                # Of the first of these batches some rows may be new.
                kept = rest if number == 0 else 0
                drawn[:kept] = ids[:kept]
                varied.append(Batch(drawn.cpu(), batch.lengths))
        return batches[:whole] + varied

    def _learn(self, batches: Sequence[Batch], stage: str) -> Lesson:
        return learn(
            self._instance,
            self.replay,
            batches,
            folder=self._room.folder,
            progress=lambda *done: self._progress(stage, *done),
            device_bytes=self._room.device_bytes,
        )


def rows_of(documents: Sequence[Document], length: int, seed: int) -> Iterator[Document]:
    """Rows of ``length`` tokens, without end, of random pieces of documents.

    Few documents would be learnt by heart. In ever new neighbourhoods their tokens mean something else, so
    the same text teaches more; and equal rows need no padding. All of the text comes before any of it comes
    again, cut and mixed anew.
    """
    generator = random.Random(seed)
    text: list[int] = []
    while True:
        pieces = [piece for document in documents for piece in _pieces(document, length, generator)]
        generator.shuffle(pieces)
        for piece in pieces:
            text += piece
            while len(text) >= length:
                yield Document(tuple(text[:length]))
                del text[:length]


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
