"""The original model beside the quantised one, block by block, for methods that compare the two."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.models import BlockReplay, ModelInstance
from marlinq.models.projection import Projection, tapped

# Tokens that say enough about a drift: four for each channel of the widest layers there are.
_ENOUGH_TOKENS = 1 << 16


def compared_batches(batches: Sequence[Batch], shards: int = 1) -> list[int]:
    """The batches that the original runs too: all of a short text; of a long one evenly spaced batches, that
    many that 65,536 tokens are seen (up to twice as many), since each costs a forward pass.

    Args:
        batches: longest documents first.
        shards: of the text, of which ``batches`` are one.
    """
    tokens = shards * sum(sum(batch.lengths) for batch in batches)
    return list(range(0, len(batches), max(1, tokens // _ENOUGH_TOKENS)))


class OriginalStates:
    """The hidden states that the original has between blocks.

    Args:
        instance: the live model; a block has its original weights whenever it is run here.
        replay: of the instance, with the batches recorded.
        states: what enters the first block; overwritten.
        batches: numbers of the batches that ``states`` holds, in order.
    """

    def __init__(
        self, instance: ModelInstance, replay: BlockReplay, states: HiddenStates, batches: Sequence[int]
    ) -> None:
        self._instance, self._replay, self._states = instance, replay, states
        self._places = {number: place for place, number in enumerate(batches)}

    def advance(self, index: int, batch: int, projections: Sequence[Projection] = ()) -> dict[str, Tensor]:
        """Runs a block on a batch; its output takes the place of its input.

        Args:
            index: of the block; every batch goes through every block once, in order.
            batch: number of the batch; one that the original does not run has no inputs.
            projections: whose inputs are wanted, [..., K] by name. Experts see tokens of their own choice in
                either model, so theirs can't be paired and are left out.
        """
        inputs: dict[str, Tensor] = {}
        place = self._places.get(batch)
        if place is None:
            return inputs
        paired = [projection for projection in projections if projection.expert is None]
        with tapped(self._instance.model, paired, inputs.__setitem__):
            output = self._replay.run(index, batch, self._states.load(place))
        self._states.store(place, output)
        return inputs
