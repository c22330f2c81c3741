"""Runs the original model beside the quantised one, block by block, for methods that compare the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.models import BlockReplay, ModelInstance, Projection, StreamFinder, streams_at, tapped

_ENOUGH_TOKENS = 3 << 14
"""tokens from which drift is estimated: three for each input channel of a layer with K = 16,384"""


def compared_batches(batches: Sequence[Batch], shards: int = 1) -> list[int]:
    """Numbers of the batches that the original model runs too, since each costs two more forward passes.

    All batches of a short text; of a longer one evenly spaced batches with 49,152 to 98,304 tokens.

    Args:
        batches: this process's batches, longest documents first.
        shards: number of processes that share the text.
    """
    tokens = shards * sum(sum(batch.lengths) for batch in batches)
    return list(range(0, len(batches), _stride(tokens)))


def compared_share(tokens: int) -> float:
    """Share of a text of ``tokens`` tokens that the original model runs too, above 0 and up to 1."""
    return 1 / _stride(tokens)


def _stride(tokens: int) -> int:
    return max(1, tokens // _ENOUGH_TOKENS)


@dataclass(frozen=True)
class OriginalRun:
    """Recorded tensors of one batch in a block of the original; empty for a batch that it does not run.

    Attributes:
        inputs: name of a projection -> its input, [..., K].
        streams: name of a module whose input is the residual stream -> that input, [..., H].
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    streams: dict[str, Tensor] = field(default_factory=dict)


class OriginalStates:
    """The original model's hidden states between blocks.

    Args:
        instance: the loaded model; a block must have its original weights whenever it is run here.
        replay: replay of the instance, with the batches recorded.
        states: hidden states that enter the first block; overwritten.
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
        """Output [B, T, H] of the last block that the batch ran through."""
        return self._states.load(self._places[batch])

    def advance(
        self,
        index: int,
        batch: int,
        projections: Sequence[Projection] = (),
        streams: Iterable[str] = (),
    ) -> OriginalRun:
        """Runs a block on a batch and stores its output in the place of its input.

        Args:
            index: index of the block; every batch runs through every block once, in order.
            batch: number of the batch.
            projections: projections whose inputs are recorded. Experts are left out: the two models route
                tokens differently, so that their inputs can't be compared.
            streams: names of modules whose input, the residual stream, is recorded.
        """
        run = OriginalRun()
        place = self._places.get(batch)
        if place is None:
            return run
        with (
            self._tapped(projections, run),
            streams_at(self._instance.model, streams, run.streams.__setitem__),
        ):
            output = self._replay.run(index, batch, self._states.load(place))
        self._states.store(place, output)
        return run

    def explore(
        self, index: int, batch: int, projections: Sequence[Projection]
    ) -> tuple[OriginalRun, dict[str, str]]:
        """Runs a block as :meth:`advance` does and finds the projections that write to the residual stream.

        Returns:
            the recorded tensors, and projection -> module whose input (or the block whose output) is the
            stream after it. Projections that share their input with others are left out, because they are
            solved together with those.
        """
        run = OriginalRun()
        place = self._places.get(batch)
        if place is None:
            return run, {}
        name = self._instance.blueprint.blocks[index].name
        hidden = self._states.load(place)
        finder = StreamFinder(self._instance.model, name, projections)
        with self._tapped(projections, run), finder.watching(hidden):
            output = self._replay.run(index, batch, hidden)
        writers, streams = finder.found(output)
        self._states.store(place, output)
        readers = Counter(x.data_ptr() for x in run.inputs.values())
        writers = {
            projection: where
            for projection, where in writers.items()
            if readers[run.inputs[projection].data_ptr()] == 1
        }
        run.streams.update(streams)
        run.streams.pop(name, None)
        return run, writers

    def _tapped(self, projections: Sequence[Projection], run: OriginalRun) -> AbstractContextManager[None]:
        paired = [projection for projection in projections if projection.expert is None]
        return tapped(self._instance.model, paired, run.inputs.__setitem__)
