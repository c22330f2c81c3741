"""The original model beside the quantised one, block by block, for methods that compare the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.models import BlockReplay, ModelInstance, Projection, StreamFinder, streams_at, tapped

# Tokens that say enough about a drift: three for each channel of the widest layers there are.
_ENOUGH_TOKENS = 3 << 14


def compared_batches(batches: Sequence[Batch], shards: int = 1) -> list[int]:
    """The batches that the original runs too: all of a short text; of a long one evenly spaced batches, that
    many that 49,152 tokens are seen (up to twice as many), since each costs two forward passes.

    Args:
        batches: longest documents first.
        shards: shards of the text, of which ``batches`` are one.
    """
    tokens = shards * sum(sum(batch.lengths) for batch in batches)
    return list(range(0, len(batches), _stride(tokens)))


def compared_share(tokens: int) -> float:
    """What part of a text of ``tokens`` the original runs on, above 0 and up to 1."""
    return 1 / _stride(tokens)


def _stride(tokens: int) -> int:
    return max(1, tokens // _ENOUGH_TOKENS)


@dataclass(frozen=True)
class OriginalRun:
    """What a block of the original saw of one batch; empty for a batch that it does not run.

    Attributes:
        inputs: inputs of projections, [..., K] by name.
        streams: the residual stream behind projections that write to it, [..., H] by the name of the module
            whose input it is.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    streams: dict[str, Tensor] = field(default_factory=dict)


class OriginalStates:
    """The hidden states that the original has between blocks.

    Args:
        instance: the live model; a block has its original weights whenever it is run here.
        replay: replay of the instance, with the batches recorded.
        states: hidden states in front of the first block; overwritten.
        batches: numbers of the batches that ``states`` holds, in order.
    """

    def __init__(
        self, instance: ModelInstance, replay: BlockReplay, states: HiddenStates, batches: Sequence[int]
    ) -> None:
        self._instance, self._replay, self._states = instance, replay, states
        self._places = {number: place for place, number in enumerate(batches)}

    def has(self, batch: int) -> bool:
        """Whether the original runs the batch of this number."""
        return batch in self._places

    def output(self, batch: int) -> Tensor:
        """What the block that a batch went through last made of it, [B, T, H]."""
        return self._states.load(self._places[batch])

    def advance(
        self,
        index: int,
        batch: int,
        projections: Sequence[Projection] = (),
        streams: Iterable[str] = (),
    ) -> OriginalRun:
        """Runs a block on a batch; its output takes the place of its input.

        Args:
            index: index of the block; every batch goes through every block once, in order.
            batch: its number.
            projections: whose inputs are wanted. Experts see tokens of their own choice in either model, so
                theirs can't be paired and are left out.
            streams: names of modules whose input is the residual stream, where that is wanted.
        """
        found = OriginalRun()
        place = self._places.get(batch)
        if place is None:
            return found
        with (
            self._tapped(projections, found),
            streams_at(self._instance.model, streams, found.streams.__setitem__),
        ):
            output = self._replay.run(index, batch, self._states.load(place))
        self._states.store(place, output)
        return found

    def explore(
        self, index: int, batch: int, projections: Sequence[Projection]
    ) -> tuple[OriginalRun, dict[str, str]]:
        """:meth:`advance`, and which of ``projections`` write to the residual stream: for each of these, by
        name, where the stream behind it is. One whose input another reads too is not among them, for they
        are solved together."""
        found = OriginalRun()
        place = self._places.get(batch)
        if place is None:
            return found, {}
        name = self._instance.blueprint.blocks[index].name
        hidden = self._states.load(place)
        finder = StreamFinder(self._instance.model, name, projections)
        with self._tapped(projections, found), finder.watching(hidden):
            output = self._replay.run(index, batch, hidden)
        writers, streams = finder.found(output)
        self._states.store(place, output)
        readers = Counter(x.data_ptr() for x in found.inputs.values())
        writers = {
            projection: where
            for projection, where in writers.items()
            if readers[found.inputs[projection].data_ptr()] == 1
        }
        found.streams.update(streams)
        found.streams.pop(name, None)
        return found, writers

    def _tapped(self, projections: Sequence[Projection], found: OriginalRun) -> AbstractContextManager[None]:
        paired = [projection for projection in projections if projection.expert is None]
        return tapped(self._instance.model, paired, found.inputs.__setitem__)
