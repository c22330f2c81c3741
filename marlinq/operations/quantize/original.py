"""The original model beside the quantised one, block by block, for methods that compare the two."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from marlinq.calibration import HiddenStates
from marlinq.models import BlockReplay, ModelInstance
from marlinq.models.projection import Projection, tapped


class OriginalStates:
    """The hidden states that the original has between blocks.

    Args:
        instance: the live model; a block has its original weights whenever it is run here.
        replay: of the instance, with the batches recorded.
        states: what enters the first block; overwritten.
    """

    def __init__(self, instance: ModelInstance, replay: BlockReplay, states: HiddenStates) -> None:
        self._instance, self._replay, self._states = instance, replay, states

    def advance(self, index: int, batch: int, projections: Sequence[Projection] = ()) -> dict[str, Tensor]:
        """Runs a block on a batch; its output takes the place of its input.

        Args:
            index: of the block; every batch goes through every block once, in order.
            batch: number of the batch.
            projections: whose inputs are wanted, [..., K] by name. Experts see tokens of their own choice in
                either model, so theirs can't be paired and are left out.
        """
        inputs: dict[str, Tensor] = {}
        paired = [projection for projection in projections if projection.expert is None]
        with tapped(self._instance.model, paired, inputs.__setitem__):
            output = self._replay.run(index, batch, self._states.load(batch))
        self._states.store(batch, output)
        return inputs
