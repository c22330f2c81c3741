"""Statistics of a block's fused experts, and the fallback for experts that few tokens reach.

An expert is calibrated on the tokens that the router sends to it. If they are fewer than the recipe's
``expert_tokens``, the expert gets the recipe's fallback, from a second pass in which it sees every token of
the layer.

The statistics of a slice of the experts are in memory at a time. Experts of one block don't feed each other,
so a slice is solved and replaced before the next is gathered, and the size of a slice changes no bit of the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from marlinq.calibration import HiddenStates
from marlinq.core.display import counted
from marlinq.methods import SolveReport, Statistics
from marlinq.models import (
    BlockReplay,
    Experts,
    ExpertTokens,
    ModelInstance,
    expert_inputs,
    tapped_layer,
)
from marlinq.models.fused_experts import FIRST, SECOND, Reached
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.ranks import ALONE, Ranks
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.solves import add_up

ROUTED, ALL = "routed", "all"
BLEND, SHARED = "blend", "shared"

_Statistics = dict[tuple[int, int], Statistics]
"""(expert, product) -> statistics of the product's input."""

NewStatistics = Callable[[PlannedModule], Statistics]


@dataclass(frozen=True)
class ExpertGroup:
    """Projections that share an input and are solved together.

    Attributes:
        members: gate and up, or down; of several experts where they share the input.
        statistics: statistics of the input; None for a method without calibration.
        tokens: number of tokens that the router sent to the expert.
        fallback: sentence on the fallback for an expert with too few tokens, or None.
    """

    members: tuple[PlannedModule, ...]
    statistics: Statistics | None
    tokens: int
    fallback: str | None

    def noted(self, report: SolveReport) -> SolveReport:
        """``report`` with this group's fallback in front of the method's."""
        notes = [note for note in (self.fallback, report.fallback) if note]
        return replace(report, fallback="; ".join(notes)) if notes else report


class ExpertCalibration:
    """The statistics of fused experts, slice by slice.

    Args:
        instance: the loaded model.
        replay: the recorded calls of its blocks.
        recipe: recipe with the settings of experts.
        batches: number of this process's batches.
        new: function that makes empty statistics of a projection's input.
        ranks: processes that share the work.
    """

    def __init__(
        self,
        instance: ModelInstance,
        replay: BlockReplay,
        recipe: Recipe,
        batches: int,
        new: NewStatistics,
        ranks: Ranks = ALONE,
    ) -> None:
        self._instance = instance
        self._replay = replay
        self._recipe = recipe
        self._batches = batches
        self._new = new
        self._ranks = ranks
        self._whole: ExpertTokens | None = None

    def groups(
        self,
        index: int,
        experts: Experts,
        planned: Mapping[str, PlannedModule],
        states: HiddenStates | None,
    ) -> Iterator[list[ExpertGroup]]:
        """The groups to solve for the experts of block ``index``, in order, a list at a time.

        A group's statistics are freed when the next list is asked for. The block's other modules must keep
        the weights that experts are calibrated with; experts of earlier lists may be replaced meanwhile.

        Args:
            index: index of the block, whose weights are in memory.
            experts: experts of the block.
            planned: every projection of the experts by name.
            states: hidden states that enter the block; None for a method without calibration.
        """
        members = [
            (tuple(planned[projection.name] for projection in first), planned[second.name])
            for first, second in map(experts.of, range(experts.count))
        ]
        if states is None or not members[0][1].method.calibrated:
            for first, second in members:
                yield [ExpertGroup((projection,), None, 0, None) for projection in (*first, second)]
            return
        try:
            yield from self._calibrated(index, experts, members, states)
        finally:
            self._whole = None

    def _calibrated(
        self,
        index: int,
        experts: Experts,
        members: Sequence[tuple[tuple[PlannedModule, ...], PlannedModule]],
        states: HiddenStates,
    ) -> Iterator[list[ExpertGroup]]:
        every = self._recipe.experts == ALL
        pooled: _Statistics = {}
        for part in _slices(experts.count, self._slice(experts, every)):
            gathered = self._gather(index, experts, members, part, states, pooled, all_tokens=every)
            if every:
                group = ExpertGroup(
                    tuple(each for expert in part for each in members[expert][0]),
                    gathered[_EVERY, FIRST],
                    gathered[_EVERY, FIRST].tokens,
                    None,
                )
                yield [group]
            starved = [] if every else self._starved(part, gathered)
            notes = self._relieve(index, experts, members, starved, states, pooled, gathered)
            for some in _cut(part, _TOGETHER * self._ranks.size):
                turn = []
                for expert in some:
                    first, second = members[expert]
                    tokens, note = notes.get(expert, (None, None))
                    groups = (((second,), SECOND),) if every else ((first, FIRST), ((second,), SECOND))
                    for each, product in groups:
                        statistics = gathered.pop((expert, product))
                        counted = statistics.tokens if tokens is None else tokens
                        turn.append(ExpertGroup(each, statistics, counted, note))
                yield turn
                turn.clear()

    def _starved(self, part: Sequence[int], statistics: _Statistics) -> list[int]:
        least = self._recipe.expert_tokens
        return [
            expert
            for expert in part
            if (expert, FIRST) not in statistics or statistics[expert, FIRST].tokens < least
        ]

    def _relieve(
        self,
        index: int,
        experts: Experts,
        members: Sequence[tuple[tuple[PlannedModule, ...], PlannedModule]],
        starved: Sequence[int],
        states: HiddenStates,
        pooled: _Statistics,
        statistics: _Statistics,
    ) -> dict[int, tuple[int, str]]:
        """Completes the statistics ``found`` of experts with too few tokens, and returns expert ->
        (its tokens, sentence on the fallback)."""
        if not starved:
            return {}
        least, way = max(self._recipe.expert_tokens, 1), self._recipe.expert_fallback
        if way == SHARED and (_POOL, SECOND) not in pooled:
            pooled[_POOL, SECOND] = self._pooled(index, experts, members, states)
        extra = self._gather(
            index,
            experts,
            members,
            [] if way == SHARED and (_EVERY, FIRST) in pooled else starved,
            states,
            pooled,
            all_tokens=True,
        )
        notes = {}
        for expert in starved:
            tokens = statistics[expert, FIRST].tokens if (expert, FIRST) in statistics else 0
            for product, planned in ((FIRST, members[expert][0][0]), (SECOND, members[expert][1])):
                whole = pooled[_EVERY, FIRST] if product == FIRST else extra.get((expert, SECOND))
                if way == SHARED and product == SECOND:
                    whole = pooled[_POOL, SECOND]
                assert whole is not None
                mine = statistics.get((expert, product)) or self._new(planned)
                # BLEND: the missing tokens are taken as drawn from all tokens of the layer.
                mine.blend(whole, share=1 - tokens / least if way == BLEND else 1.0)
                statistics[expert, product] = mine
            reason = f"{counted(tokens, 'tokens')}, fewer than {least} tokens: {_MEANINGS[way]}"
            notes[expert] = (tokens, reason)
        return notes

    def _gather(
        self,
        index: int,
        experts: Experts,
        members: Sequence[tuple[tuple[PlannedModule, ...], PlannedModule]],
        part: Collection[int],
        states: HiddenStates,
        pooled: _Statistics,
        *,
        all_tokens: bool,
    ) -> _Statistics:
        """The statistics of the experts ``part``, from the tokens routed to them or from all tokens.

        With ``all_tokens``, the input of the first product is the same for every expert; its statistics are
        gathered once per layer and kept in ``pooled``.
        """
        statistics: _Statistics = {}
        layer = (_EVERY, FIRST)
        known = layer in pooled

        def receive(expert: int, product: int, x: Tensor) -> None:
            key = (expert, product)
            if all_tokens and product == FIRST:
                if known or expert != first:
                    return
                key = layer
            if key not in statistics:
                planned = members[expert]
                statistics[key] = self._new(planned[0][0] if product == FIRST else planned[1])
            statistics[key].add(x)

        first = min(part, default=-1)
        if part:
            self._run(index, experts, part, states, receive, all_tokens=all_tokens)
        if not all_tokens:
            keys = [(expert, product) for expert in part for product in (FIRST, SECOND)]
            self._add_up(statistics, keys, members)
        elif part:
            layers = [] if known else [layer]
            self._add_up(statistics, [*layers, *((expert, SECOND) for expert in part)], members)
        if all_tokens:
            pooled.update({layer: statistics[layer]} if layer in statistics else {})
            statistics[layer] = pooled[layer]
        return statistics

    def _pooled(
        self,
        index: int,
        experts: Experts,
        members: Sequence[tuple[tuple[PlannedModule, ...], PlannedModule]],
        states: HiddenStates,
    ) -> Statistics:
        """Statistics of the second product's input over all experts and their routed tokens."""
        pool = self._new(members[0][1])

        def receive(expert: int, product: int, x: Tensor) -> None:
            if product == SECOND:
                pool.add(x)

        self._run(index, experts, range(experts.count), states, receive, all_tokens=False)
        add_up({_POOL: pool}, {_POOL: tuple(range(self._ranks.size))}, self._ranks)
        return pool

    def _add_up(
        self,
        statistics: _Statistics,
        keys: Sequence[tuple[int, int]],
        members: Sequence[tuple[tuple[PlannedModule, ...], PlannedModule]],
    ) -> None:
        """Sums the statistics ``found`` over all ranks; removes those without a token on any rank."""
        if self._ranks.size == 1:
            return
        for key in keys:
            if key not in statistics:
                first, second = members[max(key[0], 0)]
                statistics[key] = self._new(first[0] if key[1] == FIRST else second)
        everybody = tuple(range(self._ranks.size))
        add_up({key: statistics[key] for key in keys}, dict.fromkeys(keys, everybody), self._ranks)
        for key in keys:
            if not statistics[key].tokens:
                del statistics[key]

    def _run(
        self,
        index: int,
        experts: Experts,
        part: Collection[int],
        states: HiddenStates,
        receive: Callable[[int, int, Tensor], None],
        *,
        all_tokens: bool,
    ) -> None:
        model = self._instance.model
        with torch.no_grad():
            for given in self._given(index, experts, states):
                for expert, product, x in expert_inputs(
                    model, experts, given, set(part), all_tokens=all_tokens
                ):
                    receive(expert, product, x)

    def _given(self, index: int, experts: Experts, states: HiddenStates) -> Iterator[ExpertTokens]:
        """The layer's inputs and routing over all batches, joined into as few portions as memory allows, so
        that an expert's tokens of many batches make one product. A single portion is kept for the next
        pass."""
        if self._whole is not None:
            yield self._whole
            return
        limit = _PORTION_BYTES[self._instance.device.type]
        tokens: list[ExpertTokens] = []
        first = True
        with tapped_layer(self._instance.model, experts, tokens.append):
            for number in range(self._batches):
                with suppress(Reached):
                    self._replay.run(index, number, states.load(number))
                last = number + 1 == self._batches
                if not last and sum(given.nbytes for given in tokens) < limit:
                    continue
                portion = ExpertTokens.joined(tokens)
                tokens.clear()
                if first and last:
                    self._whole = portion
                first = False
                yield portion

    def _slice(self, experts: Experts, every: bool) -> int:
        """Number of experts whose statistics, a float32 [K, K] for each product, fit the free memory.

        With ``every``, all first products share one input and are solved together, so the limit counts four
        float32 copies of their weights instead.
        """
        together = _SOLVE_COPIES * experts.hidden * experts.parts * experts.intermediate
        each = 4 * (experts.intermediate**2 + (together if every else experts.hidden**2))
        # The smallest number over all ranks, so that all take the same steps.
        return self._ranks.least(max(1, _free_bytes(self._instance.device) // each))


_SOLVE_COPIES = 4
"""float32 copies of a weight during its solve"""
_TOGETHER = 64
"""experts that a rank solves at a time"""
_PORTION_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""bytes of a layer's inputs in memory at a time; on a GPU 131,072 tokens of 4096 channels and 16 bits. The
same on every machine, because it decides the order of sums."""
_EVERY, _POOL = -1, -2
"""Keys in the place of an expert's number: all tokens of the layer, and the routed inputs of all experts."""

_MEANINGS = {
    BLEND: "Hessian blended with that of all tokens of the layer",
    ALL: "Hessian of all tokens of the layer",
    SHARED: "Hessians of all tokens of the layer and of all its experts",
}


def _cut(part: range, size: int) -> Iterator[range]:
    return (part[start : start + size] for start in range(0, len(part), size))


def _slices(count: int, size: int) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def _free_bytes(device: torch.device) -> int:
    """Bytes that statistics may take: half of a GPU's free memory, a quarter of the host's."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available) // 4
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + unused) // 2
