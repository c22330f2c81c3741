"""Solves the experts of a decoder block group by group, and writes each as soon as it is solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from marlinq.calibration import HiddenStates
from marlinq.core.weight import QuantizedWeight
from marlinq.methods import Inputs, SolveReport
from marlinq.models import Experts, ModelInstance
from marlinq.operations.quantize.batches_of_modules import BATCH_WEIGHTS
from marlinq.operations.quantize.expert_statistics import ExpertCalibration, ExpertGroup
from marlinq.operations.quantize.module_writer import ModuleWriter, install_all
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.quantize_report import module_report
from marlinq.operations.quantize.ranks import Ranks
from marlinq.operations.quantize.solves import solves_in_turn
from marlinq.operations.quantize.watch import stop_if_far_off


class ExpertQuantizer:
    """Quantises fused experts.

    Args:
        instance: the loaded model.
        calibration: gathers the statistics of the experts.
        ranks: processes that share the work.
    """

    def __init__(
        self,
        instance: ModelInstance,
        calibration: ExpertCalibration,
        ranks: Ranks,
    ) -> None:
        self._instance = instance
        self._calibration = calibration
        self._ranks = ranks

    def quantize(
        self,
        index: int,
        experts: Experts,
        planned: Mapping[str, PlannedModule],
        states: HiddenStates | None,
        written: ModuleWriter,
        *,
        keep: bool,
    ) -> dict[str, Any]:
        """Quantises the experts of block ``index`` and writes them, each as soon as it is solved.

        Args:
            index: index of the block, whose weights are in memory.
            experts: experts of the block.
            planned: every projection of the experts by name.
            states: hidden states that enter the block; None for a method without calibration.
            written: writer of the results.
            keep: whether the block in memory gets the quantised weights.

        Returns:
            Notes to commit together with the written modules.
        """
        notes: dict[str, Any] = {}
        fresh: list[tuple[PlannedModule, QuantizedWeight]] = []
        groups = self._calibration.groups(index, experts, planned, states)
        for group, statistics, solved, report in solves_in_turn(groups, self._solve, self._ranks):
            if keep:
                fresh.append((statistics, solved))
                if sum(weight.codes.numel() for _, weight in fresh) > BATCH_WEIGHTS:
                    install_all(self._instance, fresh)
                    fresh.clear()
            told = module_report(statistics, group.statistics, group.noted(report))
            notes |= written.add(statistics, solved, replace(told, tokens=group.tokens))
        install_all(self._instance, fresh)
        return notes

    def _solve(self, groups: Sequence[ExpertGroup]) -> list[list[tuple[QuantizedWeight, SolveReport]]]:
        """Solves groups; those with equal shapes and settings in one call of the method."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, group in enumerate(groups):
            shapes = tuple(
                (each.projection.out_features, each.projection.in_features) for each in group.members
            )
            first = group.members[0]
            alike.setdefault((shapes, first.spec.scheme, first.method, first.options), []).append(number)
        results: dict[int, list[tuple[QuantizedWeight, SolveReport]]] = {}
        for numbers in alike.values():
            first = groups[numbers[0]].members[0]
            solved = first.method.solve_many(
                [self._inputs(groups[number]) for number in numbers], first.spec.scheme, first.options
            )
            results |= dict(zip(numbers, solved, strict=True))
        stop_if_far_off(
            (each.projection.name, self._instance.weight(each.projection), quantized)
            for number, group in enumerate(groups)
            for each, (quantized, _) in zip(group.members, results[number], strict=True)
            if each.method.calibrated
        )
        return [results[number] for number in range(len(groups))]

    def _inputs(self, group: ExpertGroup) -> Inputs[Any]:
        # In the stored dtype, which the method widens: all experts in float32 would take twice the block.
        weights = [self._instance.weight(each.projection) for each in group.members]
        return Inputs(weights, group.statistics, [each.projection.name for each in group.members])
