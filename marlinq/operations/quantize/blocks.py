"""Quantises a model's decoder blocks in order, then the output head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from marlinq.calibration import Batch, HiddenStates
from marlinq.checkpoint import CheckpointWriter
from marlinq.core.errors import NumericsError
from marlinq.core.progress import ReportProgress
from marlinq.core.weight import QuantizedWeight
from marlinq.methods import SolveReport, Statistics
from marlinq.models import BlockReplay, ModelInstance
from marlinq.operations.quantize.budget import Work, gradient_jobs, logits_at_once
from marlinq.operations.quantize.expert_solves import ExpertQuantizer
from marlinq.operations.quantize.expert_statistics import ExpertCalibration
from marlinq.operations.quantize.gathering import BlockOutputs, Gathered, Gathering
from marlinq.operations.quantize.gradients import LossGradients
from marlinq.operations.quantize.module_writer import ModuleWriter, install
from marlinq.operations.quantize.original import OriginalStates, compared_batches
from marlinq.operations.quantize.output_head import head_statistics, quantize_head
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.quantize_report import ModuleReport, module_report
from marlinq.operations.quantize.ranks import ALONE, Ranks
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.solves import Solve, shared_solves
from marlinq.operations.quantize.states import copied_states, first_states
from marlinq.operations.quantize.watch import stop_if_far_off


class BlockQuantizer:
    """Quantises the blocks in order, each calibrated on the outputs of the quantised blocks before it.

    A method that is not sequential is calibrated on the original blocks' outputs instead. A method without
    calibration reads weights only and runs no block.

    Args:
        instance: the loaded model.
        plan: scheme, or reason to keep, of each projection.
        writer: writes results, and holds those of an interrupted run.
        batches: calibration text; empty for a method without calibration.
        recipe: settings of the run.
        progress: called with (activity, blocks done, blocks in all).
        ranks: processes that share the work; ``batches`` is this process's share of the text.
        products: dtype that linear layers multiply in while a float32 model is calibrated; None for float32.
    """

    def __init__(
        self,
        instance: ModelInstance,
        plan: OutputPlan,
        writer: CheckpointWriter,
        batches: Sequence[Batch],
        recipe: Recipe,
        progress: ReportProgress,
        ranks: Ranks = ALONE,
        products: torch.dtype | None = None,
    ) -> None:
        self._ranks = ranks
        self._instance = instance
        self._blocks = instance.blueprint.blocks
        self._plan = plan
        self._writer = writer
        self._batches = batches
        self._progress = progress
        self._replay = BlockReplay(instance, products)
        self._gathering = Gathering(instance, self._replay, batches, ranks)
        calibration = ExpertCalibration(
            instance, self._replay, recipe, len(batches), self._gathering.empty, ranks
        )
        self._experts = ExpertQuantizer(instance, calibration, ranks)
        self._recipe = recipe
        self._gradients: LossGradients | None = None

    def run(self) -> None:
        """Quantises every block that is not written yet, then the output head if the plan has it.

        Raises:
            NumericsError: weights, activations or statistics are NaN or infinite; the module is named.
        """
        with ModuleWriter(self._plan, self._writer, self._instance, self._ranks) as self._written:
            self._run()

    def _run(self) -> None:
        members_of = [self._plan.members(block) for block in self._blocks]
        head = self._plan.head
        if head is not None and self._plan.is_written(head, self._writer.written, self._writer.notes):
            head = None
        # Blocks after the last one with quantised modules are run only for the head's calibration.
        count = max((index for index, members in enumerate(members_of) if members), default=-1) + 1
        calibrated = self._plan.method.calibrated
        to_the_end = head is not None and calibrated
        if to_the_end:
            count = len(self._blocks)
        written = self._writer.written  # the property builds a new set each time
        is_written = [
            self._plan.are_written(members, written, self._writer.notes) for members in members_of[:count]
        ]
        onward = [calibrated and (to_the_end or index + 1 < count) for index in range(count)]
        # Other blocks are neither quantised nor run.
        needed = [index for index in range(count) if onward[index] or not is_written[index]]
        states = None
        unwritten = [members for members, done in zip(members_of, is_written, strict=False) if not done]
        if any(map(self._using_output_gradients, unwritten)):
            states = first_states(self._instance, self._replay, self._batches, self._writer.partial)
            self._gradients = self._take_gradients(states)
        with self._instance.reading_ahead(needed):
            if states is None and calibrated:
                states = first_states(self._instance, self._replay, self._batches, self._writer.partial)
            if states is not None and self._is_paired():
                compared = compared_batches(self._batches, self._ranks.size)
                copy = copied_states(self._instance, states, self._batches, compared, self._writer.partial)
                self._gathering.original = OriginalStates(
                    self._instance, self._replay.beside(), copy, compared
                )
            self._progress("quantising blocks", 0, count)
            for index in range(count):
                if index in needed:
                    self._block(index, members_of[index], states, is_written[index], onward[index])
                self._progress("quantising blocks", index + 1, count)
            if head is not None:
                self._progress("quantising the output head", 0, 1)
                self._quantize_head(head, states)
                self._progress("quantising the output head", 1, 1)

    def _block(
        self,
        index: int,
        members: Sequence[PlannedModule],
        states: HiddenStates | None,
        is_written: bool,
        onward: bool,
    ) -> None:
        """Quantises a block unless it is written; with ``onward``, computes the inputs of the next block."""
        module = self._instance.block(index)
        _check_weights(self._blocks[index].name, module)
        keep = onward and self._plan.method.sequential
        # once: one run gives statistics and outputs alike. Not with experts, whose statistics are gathered
        # slice by slice, each in a run of its own.
        routed = self._instance.blueprint.routed or bool(self._blocks[index].experts)
        once = onward and bool(members) and not (keep or is_written or routed)
        if is_written:
            self._advance_original(index)
            for planned in members if keep else ():
                install(self._instance, planned, self._written.read_back(planned))
        else:
            self._quantize(index, members, states, keep=keep, once=once)
        if states is not None and onward and not once:
            self._advance(index, states)
        self._instance.release_block(index)

    def _is_paired(self) -> bool:
        """Whether the method of any module compares its inputs with those in the original model."""
        return any(planned.method.paired(planned.options) for planned in self._plan.modules.values())

    def _using_output_gradients(self, members: Sequence[PlannedModule]) -> list[PlannedModule]:
        """The members whose method uses the gradients of the loss at their outputs."""
        return [
            planned
            for planned in members
            if planned.method.uses_output_gradients(planned.options)
            and planned.projection.whole
            and not self._instance.blueprint.routed
        ]

    def _take_gradients(self, states: HiddenStates) -> LossGradients:
        device = self._instance.device
        work = Work.of(self._instance.blueprint)
        return LossGradients(
            self._instance,
            self._replay,
            self._batches,
            gradient_jobs([sum(batch.lengths) for batch in self._batches], work, device),
            states,
            logits=logits_at_once(self._instance.blueprint.config, device),
            seed=self._recipe.seed,
            folder=self._writer.partial,
            device_bytes=torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0,
            progress=self._progress,
        )

    def _advance_original(self, index: int) -> None:
        """Runs a block of the original on all batches without recording its modules' inputs."""
        original = self._gathering.original
        if original is not None:
            for number in range(len(self._batches)):
                original.advance(index, number)

    def _advance(self, index: int, states: HiddenStates) -> None:
        outputs = BlockOutputs(self._blocks[index].name, states)
        for number in range(len(self._batches)):
            outputs.keep(number, self._replay.run(index, number, states.load(number)))
        outputs.check()

    def _quantize(
        self,
        index: int,
        members: Sequence[PlannedModule],
        states: HiddenStates | None,
        *,
        keep: bool,
        once: bool,
    ) -> None:
        """Quantises a block and writes it.

        With ``keep``, the block in memory gets the quantised weights. With ``once``, its outputs replace its
        inputs in ``states``.
        """
        of_experts = {name for each in self._blocks[index].experts for name in each.parameters}
        fused = {
            member.projection.name: member for member in members if member.projection.parameter in of_experts
        }
        members = [member for member in members if member.projection.name not in fused]
        by_name = {planned.projection.name: planned for planned in members}
        module = self._instance.model.get_submodule(self._blocks[index].name)
        ways = dict.fromkeys((each.method, each.options) for each in (*members, *fused.values()))
        for method, options in ways:
            method.transform(module, options)
        if not any(member.method.calibrated for member in members):
            self._advance_original(index)
        calibrated = [member for member in members if member.method.calibrated]
        alone = [(member.projection.name,) for member in members if not member.method.calibrated]
        if states is None or not calibrated:
            gathered = Gathered([(member.projection.name,) for member in calibrated], [], {})
        else:
            outputs = BlockOutputs(self._blocks[index].name, states) if once else None
            moments = {}
            if self._gradients is not None:
                using = [planned.projection for planned in self._using_output_gradients(calibrated)]
                moments = self._gradients.moments(index, using, states)
            gathered = self._gathering.gather(index, calibrated, states, outputs)
            for group in (*gathered.groups, *gathered.late):
                of_group = {name: moments[name] for name in group if name in moments}
                if of_group:
                    gathered.statistics[group[0]].outputs.update(of_group)
            if outputs is not None:
                outputs.check()
        quantized: dict[str, QuantizedWeight] = {}
        notes: dict[str, Any] = {}
        for late, groups in enumerate(([*gathered.groups, *alone], gathered.late)):
            if not groups:
                continue
            if late and states is not None:
                # Late projections are calibrated with the block's other projections quantised.
                for name, solved in quantized.items():
                    install(self._instance, by_name[name], solved)
                quantized.clear()
                self._gathering.gather_late(index, calibrated, states, gathered)
            for planned, solved, report in self._solved(groups, by_name, gathered):
                if keep or gathered.late:
                    quantized[planned.projection.name] = solved
                notes |= self._written.add(planned, solved, report)
        for experts in self._blocks[index].experts:
            if experts.projections[0].name in fused:
                notes |= self._experts.quantize(index, experts, fused, states, self._written, keep=keep)
        for name, solved in quantized.items():
            install(self._instance, by_name[name], solved)
        self._written.commit(notes)

    def _solved(
        self, groups: Sequence[tuple[str, ...]], by_name: Mapping[str, PlannedModule], gathered: Gathered
    ) -> Iterator[tuple[PlannedModule, QuantizedWeight, ModuleReport]]:
        solves = [
            Solve(tuple(members), group[0])
            for group in groups
            for members in _of_equal_settings([by_name[name] for name in group])
        ]
        # Removed from ``gathered`` so that each group's memory is free once it is solved.
        statistics = {
            group[0]: gathered.statistics.pop(group[0]) for group in groups if group[0] in gathered.statistics
        }
        # No cuts with drift correction, whose size is bounded by a norm over the whole weight.
        return shared_solves(solves, statistics, self._solve, self._ranks, cut=not self._is_paired())

    def _quantize_head(self, head: PlannedModule, states: HiddenStates | None) -> None:
        statistics = None
        if states is not None and head.method.calibrated:
            statistics = head_statistics(self._gathering, head, self._batches, states, self._ranks)
        if not self._ranks.first:
            return
        solved, report = quantize_head(self._instance, head, statistics)
        notes = self._written.add(head, solved, module_report(head, statistics, report))
        self._written.commit(notes)

    def _solve(
        self,
        members: Sequence[PlannedModule],
        statistics: Statistics | None,
        rows: Sequence[slice],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        """Solves the output channels ``rows[i]`` of each module ``members[i]``."""
        solved: list[tuple[QuantizedWeight, SolveReport]] = members[0].method.solve(
            [
                self._instance.weight(planned.projection)[part].to(torch.float32)
                for planned, part in zip(members, rows, strict=True)
            ],
            statistics,
            members[0].spec.scheme,
            members[0].options,
            names=[planned.projection.name for planned in members],
        )
        if members[0].method.calibrated:
            stop_if_far_off(
                (planned.projection.name, self._instance.weight(planned.projection)[part], quantized)
                for planned, part, (quantized, _) in zip(members, rows, solved, strict=True)
            )
        return solved


def _of_equal_settings(members: Sequence[PlannedModule]) -> list[list[PlannedModule]]:
    batches: dict[tuple[object, ...], list[PlannedModule]] = {}
    for planned in members:
        batches.setdefault((planned.spec.scheme, planned.method, planned.options), []).append(planned)
    return list(batches.values())


def _check_weights(name: str, block: nn.Module) -> None:
    parameters = dict(block.named_parameters())
    # Launches every check before the first result is waited for.
    finite = [torch.isfinite(parameter).all() for parameter in parameters.values()]
    for (inner, parameter), is_finite in zip(parameters.items(), finite, strict=True):
        if not bool(is_finite):
            bad = int((~torch.isfinite(parameter)).sum())
            raise NumericsError(
                f"{name}.{inner}: {bad} of {parameter.numel()} weights are NaN or infinite; "
                "check the source checkpoint"
            )
