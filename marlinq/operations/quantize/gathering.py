"""Gathers statistics of the inputs of a decoder block's projections, and of the same inputs in the original
model for methods that compare the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.methods import Statistics
from marlinq.models import BlockReplay, ModelInstance, Projection, shared_inputs, streams_at
from marlinq.operations.quantize.original import OriginalRun, OriginalStates
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.ranks import Ranks


class Gathering:
    """Runs blocks on the calibration text to gather statistics of their projections' inputs.

    Args:
        instance: the loaded model.
        replay: the recorded calls of its blocks.
        batches: this process's share of the calibration text.
        ranks: processes that share the work.
    """

    def __init__(
        self,
        instance: ModelInstance,
        replay: BlockReplay,
        batches: Sequence[Batch],
        ranks: Ranks,
    ) -> None:
        self.instance, self.replay = instance, replay
        self.shapes = [tuple(batch.ids.shape) for batch in batches]
        self.masks = [batch.mask().to(instance.device) if batch.padded else None for batch in batches]
        self._ranks = ranks
        self.original: OriginalStates | None = None
        """Hidden states of the original model; None unless a method compares the two models."""

    def empty(self, planned: PlannedModule) -> Statistics:
        """New statistics of a projection's input, without any token."""
        projection = planned.projection
        statistics: Statistics = planned.method.statistics(
            projection.in_features, planned.options, device=self.instance.device, name=projection.name
        )
        return statistics

    def gather(
        self,
        index: int,
        members: Sequence[PlannedModule],
        states: HiddenStates,
        outputs: BlockOutputs | None = None,
    ) -> Gathered:
        """Runs block ``index`` on all of the text and returns its projections' statistics.

        Args:
            index: index of the block, whose weights are in memory.
            members: calibrated projections of the block.
            states: hidden states that enter the block.
            outputs: receives the block's outputs; None drops them.
        """
        by_name = {planned.projection.name: planned for planned in members}
        original, places = OriginalRun(), dict[str, str]()
        if self.original is not None:
            paired = [each.projection for each in members if each.method.paired(each.options)]
            original, places = self.original.explore(index, 0, paired)
        places = self._ranks.share_json(places)
        block = _Block(self, index, by_name, places)

        # The first batch records the inputs of all projections, which tells those that share an input.
        groups = shared_inputs(
            self.instance.model,
            [planned.projection for planned in members],
            lambda: block.run(0, states.load(0), original, outputs),
            block.receive,
        )
        start = 1
        agreed = [tuple(group) for group in self._ranks.share_json(groups)]
        if agreed != groups:
            # This rank's first batch reached other experts than the first rank's: start over with its groups.
            groups, start = agreed, 0
            block.statistics.clear()
        first = [by_name[group[0]].projection for group in groups]
        read = [projection for projection in first if projection.name not in places]
        for number in range(start, len(self.masks)):
            original = OriginalRun()
            # A first batch that is run again has no pairs: the original's block has already run on it.
            if number and self.original is not None:
                original = self.original.advance(index, number, read, block.inner)
            wanted = [each for each in first if not block.is_late(each.name, number)]
            # Experts run in an order that depends on the tokens, so no projection is known to be the last.
            to_the_end = outputs is not None or self.instance.blueprint.routed
            last = None if to_the_end or not wanted else wanted[-1].name
            block.run(number, states.load(number), original, outputs, wanted, last)
        for projection in first:
            # Makes empty statistics for an expert that no token reached.
            block.statistics_of(projection.name)
        late = [group for group in groups if places.get(group[0]) == block.name]
        return Gathered([group for group in groups if group not in late], late, block.statistics)

    def gather_late(
        self, index: int, members: Sequence[PlannedModule], states: HiddenStates, gathered: Gathered
    ) -> None:
        """Adds the compared batches to the statistics of :attr:`Gathered.late`, once the block's other
        projections are quantised.

        Args:
            index: index of the block, whose other projections have their quantised weights.
            members, states: as for :meth:`gather`.
            gathered: result of :meth:`gather`.
        """
        if self.original is None or not gathered.late:
            return
        names = {name for group in gathered.late for name in group}
        late = [planned.projection for planned in members if planned.projection.name in names]
        for number, mask in enumerate(self.masks):
            if not self.original.has(number):
                continue
            inputs: dict[str, Tensor] = {}
            output = self.replay.inputs(index, number, states.load(number), late, inputs.__setitem__)
            if output is None:
                raise AssertionError("the block stopped early although no projection was given as the last")
            original = self.original.output(number)
            for name, x in inputs.items():
                gathered.statistics[name].add_stream(x, output, original, mask)


@dataclass(frozen=True)
class Gathered:
    """Statistics of the inputs of a block's projections.

    Attributes:
        groups: names of projections that share an input, one tuple for each input.
        late: groups that write to the residual stream at the block's end. They are solved after the others,
            so that they also correct the error of the other, already quantised projections.
        statistics: statistics of each group by its first name. Those of late groups lack the batches that
            the original runs too, which :meth:`Gathering.gather_late` adds.
    """

    groups: list[tuple[str, ...]]
    late: list[tuple[str, ...]]
    statistics: dict[str, Any]


class BlockOutputs:
    """Stores a block's outputs in the place of its inputs.

    Args:
        block: name of the block.
        states: hidden states of every batch.
    """

    def __init__(self, block: str, states: HiddenStates) -> None:
        self._block, self._states = block, states
        self._finite: list[Tensor] = []

    def keep(self, batch: int, output: Tensor) -> None:
        """Puts ``output`` in the place of the input of ``batch``."""
        self._finite.append(torch.isfinite(output).all())
        self._dtype = output.dtype
        self._states.store(batch, output)

    def check(self) -> None:
        """Checks all outputs at once, after the last batch, because the check waits for the device.

        Raises:
            NumericsError: an output holds NaN or infinity.
        """
        if not bool(torch.stack(self._finite).all()):
            raise NumericsError(
                f"{self._block}: its output holds NaN or infinity in "
                f"{str(self._dtype).removeprefix('torch.')}; check the source checkpoint"
            )


class _Block:
    """The statistics of one block while batches run through it.

    Args:
        gathering: model, replay and batches.
        index: index of the block.
        planned: projections of the block by name.
        places: projection that writes to the residual stream -> module whose input (or the block whose
            output) is the stream after this projection.
    """

    def __init__(
        self,
        gathering: Gathering,
        index: int,
        planned: Mapping[str, PlannedModule],
        places: Mapping[str, str],
    ) -> None:
        self._all, self._index = gathering, index
        self.name = gathering.instance.blueprint.blocks[index].name
        self._planned, self._places = planned, places
        self.inner = {where for where in places.values() if where != self.name}
        self.statistics: dict[str, Any] = {}
        self._batch = 0
        self._original = OriginalRun()
        # Inputs of projections that write to the stream, until the stream after them has been computed.
        self._waiting: dict[str, Tensor] = {}

    def run(
        self,
        batch: int,
        hidden: Tensor,
        original: OriginalRun,
        outputs: BlockOutputs | None,
        projections: Sequence[Projection] = (),
        last: str | None = None,
    ) -> None:
        """Runs the block on a batch.

        Args:
            batch: number of the batch.
            hidden: hidden states that enter the block.
            original: inputs of the original's modules for this batch.
            outputs: receives the block's output; None drops it.
            projections: projections whose inputs are recorded, besides those that already are.
            last: projection after whose input the run may stop; None runs to the end.
        """
        self._batch, self._original = batch, original
        with streams_at(self._all.instance.model, self.inner, self._reach):
            output = self._all.replay.inputs(
                self._index,
                batch,
                hidden,
                projections,
                self.receive,
                done=lambda name: name == last and not self._waiting,
            )
        if output is None:
            return
        self._reach(self.name, output)
        for name in self._waiting:
            raise UnsupportedError(
                f"{name}: expected {self._places[name]} to be called after it in every batch, as in the "
                f"first; found batch {batch} without such a call; quantise with --drift-correction 0"
            )
        if outputs is not None:
            outputs.keep(batch, output)

    def statistics_of(self, name: str) -> Any:
        """Statistics of a projection's input, made when first asked for."""
        if name not in self.statistics:
            self.statistics[name] = self._all.empty(self._planned[name])
            if name in self._places:
                self.statistics[name].write_to_stream(self._planned[name].projection.out_features)
        return self.statistics[name]

    def is_late(self, name: str, batch: int) -> bool:
        """Whether :meth:`Gathering.gather_late` adds this batch to a projection's statistics."""
        original = self._all.original
        return self._places.get(name) == self.name and original is not None and original.has(batch)

    def receive(self, name: str, x: Tensor) -> None:
        """Adds an input to a projection's statistics, at once or when the residual stream after the
        projection has been computed."""
        if self.is_late(name, self._batch):
            return
        statistics, mask = self.statistics_of(name), self._all.masks[self._batch]
        other = self._original.inputs.pop(name, None)
        if name in self._places:
            self._waiting[name] = x
        elif other is not None and self._is_pair(name, x, other):
            statistics.add_pair(x, other, mask)
        else:
            statistics.add(x, mask)

    def _reach(self, place: str, stream: Tensor) -> None:
        """Completes the projections that wait for the residual stream at ``place``."""
        for name in [name for name in self._waiting if self._places[name] == place]:
            original = self._original.streams.get(place)
            mask = self._all.masks[self._batch]
            self.statistics[name].add_stream(self._waiting.pop(name), stream, original, mask)

    def _is_pair(self, name: str, x: Tensor, original: Tensor) -> bool:
        """Whether two inputs of a projection hold the same tokens. In a model with experts only an input
        with all tokens of the batch is sure to, because each model routes tokens differently."""
        planned = self._planned[name]
        paired = planned.method.paired(planned.options)
        routed = self._all.instance.blueprint.routed
        return (
            paired
            and x.shape == original.shape
            and (not routed or x.shape[:-1] == self._all.shapes[self._batch])
        )
