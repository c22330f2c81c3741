"""The heart of a quantise run: one decoder block after the other, and the output head at last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from marlinq.calibration import Batch, HiddenStates
from marlinq.checkpoint import CheckpointWriter, WriteBehind
from marlinq.core.errors import NumericsError
from marlinq.core.progress import ReportProgress
from marlinq.core.weight import QuantizedWeight
from marlinq.methods import Inputs, SolveReport, Statistics
from marlinq.models import BlockReplay, Experts, ModelInstance
from marlinq.operations.quantize.budget import (
    STATES_BYTES,
    Work,
    gradient_jobs,
    logits_at_once,
    states_on_device,
)
from marlinq.operations.quantize.experts import ExpertCalibration, ExpertGroup
from marlinq.operations.quantize.gathering import BlockOutputs, Gathered, Gathering
from marlinq.operations.quantize.gradients import LossGradients
from marlinq.operations.quantize.head import solve_head
from marlinq.operations.quantize.lots import LOT_WEIGHTS, in_lots
from marlinq.operations.quantize.original import OriginalStates, compared_batches
from marlinq.operations.quantize.planning import OutputPlan, PlannedModule, module_note
from marlinq.operations.quantize.ranks import ALONE, Ranks
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.report import ModuleReport, module_report
from marlinq.operations.quantize.solves import Solve, add_up, shared_solves, solves_in_turn
from marlinq.operations.quantize.watch import stop_if_far_off

# Of packed tensors that are handed to the writer together, but for a block's last ones.
_LOT_BYTES = 1 << 29


class BlockQuantizer:
    """Quantises block after block, each on what the blocks before it, already quantised, make of the text.

    A method that is not sequential sees what the original makes of it; a method without calibration sees the
    weights alone: no block is run.

    Args:
        instance: the live model.
        plan: what becomes of which projection.
        writer: where results go, and where those of an interrupted run are.
        batches: the calibration text; empty for a method without calibration.
        recipe: how experts are calibrated.
        progress: told about every finished block.
        ranks: processes that share the work; ``batches`` are this one's.
        products: what the products of linear layers are rounded to while text goes through a float32 model;
            None for float32.
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
        self._gathering = Gathering(instance, self._replay, plan.method, batches, ranks)
        self._experts = ExpertCalibration(
            instance, self._replay, recipe, len(batches), self._gathering.empty, ranks
        )
        self._recipe = recipe
        self._gradients: LossGradients | None = None
        self._lot: dict[str, Tensor] = {}

    def run(self) -> None:
        """Quantises every block that is not written yet, then the output head if it is wanted.

        Raises:
            NumericsError: weights, activations or statistics are NaN or infinite; the module is named.
        """
        with WriteBehind(self._writer, self._instance.device) as self._behind:
            self._run()

    def _run(self) -> None:
        members_of = [self._plan.members(block) for block in self._blocks]
        head = self._plan.head
        if head is not None and self._plan.is_written(head, self._writer.written, self._writer.notes):
            head = None
        # Nothing after the last block with work to do is of interest, but to the head.
        count = max((index for index, members in enumerate(members_of) if members), default=-1) + 1
        calibrated = self._plan.method.calibrated
        to_the_end = head is not None and calibrated
        if to_the_end:
            count = len(self._blocks)
        written = self._writer.written  # a new set each time, of thousands of experts
        is_written = [
            all(self._plan.is_written(planned, written, self._writer.notes) for planned in members)
            for members in members_of[:count]
        ]
        onward = [calibrated and (to_the_end or index + 1 < count) for index in range(count)]
        # What the others make of the text is of interest to nobody.
        needed = [index for index in range(count) if onward[index] or not is_written[index]]
        states = None
        unwritten = [members for members, done in zip(members_of, is_written, strict=False) if not done]
        if any(map(self._minding, unwritten)):
            states = self._first_states()
            self._gradients = self._take_gradients(states)
        with self._instance.reading_ahead(needed):
            if states is None and calibrated:
                states = self._first_states()
            if states is not None and self._is_paired():
                compared = compared_batches(self._batches, self._ranks.size)
                copy = self._copy(states, compared)
                self._gathering.original = OriginalStates(self._instance, self._replay, copy, compared)
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
        """Quantises a block that is not written yet; where it goes onward, runs it on the text."""
        module = self._instance.block(index)
        _check_weights(self._blocks[index].name, module)
        keep = onward and self._plan.method.sequential
        # Where tokens choose experts, inputs are read again for each slice of statistics.
        routed = self._instance.blueprint.routed or bool(self._blocks[index].experts)
        once = onward and bool(members) and not (keep or is_written or routed)
        if is_written:
            self._advance_original(index)
            for planned in members if keep else ():
                self._install(planned, self._read_back(planned))
        else:
            self._quantize(index, members, states, keep=keep, once=once)
        if states is not None and onward and not once:
            self._advance(index, states)
        self._instance.release_block(index)

    def _is_paired(self) -> bool:
        """Whether any module is solved by comparison with the original's inputs."""
        method = self._plan.method
        return any(method.paired(planned.options) for planned in self._plan.modules.values())

    def _minding(self, members: Sequence[PlannedModule]) -> list[PlannedModule]:
        """Those that are solved by the loss's gradients at their outputs."""
        method = self._plan.method
        return [
            planned
            for planned in members
            if method.minds_outputs(planned.options)
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
        """Runs a block of the original whose inputs nobody wants."""
        original = self._gathering.original
        if original is not None:
            for number in range(len(self._batches)):
                original.advance(index, number)

    def _first_states(self) -> HiddenStates:
        recorded = self._replay.record(batch.ids for batch in self._batches)
        states: HiddenStates | None = None
        for number, hidden in enumerate(recorded):
            if not bool(torch.isfinite(hidden).all()):
                raise NumericsError("the embeddings hold NaN or infinity; check the source checkpoint")
            if states is None:
                states = self._empty_states(hidden, self._batches, states_on_device(self._instance.device))
            states.store(number, hidden)
        if states is None:
            raise ValueError("calibration needs at least one batch")
        return states

    def _empty_states(self, like: Tensor, batches: Sequence[Batch], device_bytes: int) -> HiddenStates:
        return HiddenStates(
            [(*batch.ids.shape, like.shape[-1]) for batch in batches],
            dtype=like.dtype,
            device=self._instance.device,
            limit_bytes=psutil.virtual_memory().available // 4,
            folder=self._writer.partial,
            device_bytes=device_bytes,
        )

    def _copy(self, states: HiddenStates, numbers: Sequence[int]) -> HiddenStates:
        # One large set of states is as much as a GPU should hold.
        room = min(STATES_BYTES, states_on_device(self._instance.device)) // 8
        copy = self._empty_states(states.load(0), [self._batches[number] for number in numbers], room)
        for place, number in enumerate(numbers):
            copy.store(place, states.load(number))
        return copy

    def _read_back(self, planned: PlannedModule) -> QuantizedWeight:
        stored = self._stored(planned) if self._ranks.first else None
        return self._ranks.share_weight(stored, planned.spec, 0)

    def _stored(self, planned: PlannedModule) -> QuantizedWeight:
        names = self._plan.tensor_names(planned)
        tensors = {suffix: self._writer.read_back(name) for suffix, name in names.items()}
        return self._plan.layout.unpack(tensors, planned.spec)

    def _install(self, planned: PlannedModule, quantized: QuantizedWeight) -> None:
        """Gives the block the weight that a loader of the output will see, in the dtype of the forward."""
        weight = quantized.to(self._instance.device).dequantize(self._instance.dtype)
        self._instance.replace(planned.projection, weight)

    def _install_all(self, solved: Sequence[tuple[PlannedModule, QuantizedWeight]]) -> None:
        """:meth:`_install` for many weights, those of one shape together."""
        for lot in in_lots(solved):
            dense = lot.weight.to(self._instance.device).dequantize(self._instance.dtype)
            for planned, weight in zip(lot.items, dense.chunk(len(lot.items)), strict=True):
                self._instance.replace(planned.projection, weight)

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

        With ``keep`` the block is left with the new weights; with ``once`` its output takes the place of its
        input in ``states``.
        """
        of_experts = {name for each in self._blocks[index].experts for name in each.parameters}
        fused = {
            found.projection.name: found for found in members if found.projection.parameter in of_experts
        }
        members = [found for found in members if found.projection.name not in fused]
        by_name = {planned.projection.name: planned for planned in members}
        module = self._instance.model.get_submodule(self._blocks[index].name)
        for options in dict.fromkeys(planned.options for planned in (*members, *fused.values())):
            self._plan.method.transform(module, options)
        if not members:
            self._advance_original(index)
        if states is None or not members:
            gathered = Gathered([(name,) for name in by_name], [], {})
        else:
            outputs = BlockOutputs(self._blocks[index].name, states) if once else None
            moments = {}
            if self._gradients is not None:
                minding = [planned.projection for planned in self._minding(members)]
                moments = self._gradients.moments(index, minding, states)
            gathered = self._gathering.gather(index, members, states, outputs)
            for group in (*gathered.groups, *gathered.late):
                # Whoever minds outputs has a place for them.
                found = {name: moments[name] for name in group if name in moments}
                if found:
                    gathered.statistics[group[0]].outputs.update(found)
            if outputs is not None:
                outputs.check()
        quantized: dict[str, QuantizedWeight] = {}
        notes: dict[str, Any] = {}
        for late, groups in enumerate((gathered.groups, gathered.late)):
            if not groups:
                continue
            if late and states is not None:
                # They see what the others, quantised, make of the text.
                for name, solved in quantized.items():
                    self._install(by_name[name], solved)
                quantized.clear()
                self._gathering.gather_late(index, members, states, gathered)
            for planned, solved, report in self._solved(groups, by_name, gathered):
                if keep or gathered.late:
                    quantized[planned.projection.name] = solved
                notes |= self._write(planned, solved, report)
        for experts in self._blocks[index].experts:
            if experts.projections[0].name in fused:
                notes |= self._quantize_experts(index, experts, fused, states, keep=keep)
        for name, solved in quantized.items():
            self._install(by_name[name], solved)
        self._commit(notes)

    def _solved(
        self, groups: Sequence[tuple[str, ...]], by_name: Mapping[str, PlannedModule], gathered: Gathered
    ) -> Iterator[tuple[PlannedModule, QuantizedWeight, ModuleReport]]:
        solves = [
            Solve(tuple(members), group[0])
            for group in groups
            for members in _of_equal_settings([by_name[name] for name in group])
        ]
        # They are used up.
        statistics = {
            group[0]: gathered.statistics.pop(group[0]) for group in groups if group[0] in gathered.statistics
        }
        # A correction for drift is held to a norm of the whole weight.
        return shared_solves(solves, statistics, self._solve, self._ranks, cut=not self._is_paired())

    def _quantize_experts(
        self,
        index: int,
        experts: Experts,
        planned: Mapping[str, PlannedModule],
        states: HiddenStates | None,
        *,
        keep: bool,
    ) -> dict[str, Any]:
        """Quantises fused experts and writes them, each as soon as it is solved; returns their notes."""
        notes: dict[str, Any] = {}
        fresh: list[tuple[PlannedModule, QuantizedWeight]] = []
        groups = self._experts.groups(index, experts, planned, states)
        for group, found, solved, report in solves_in_turn(groups, self._solve_groups, self._ranks):
            if keep:
                fresh.append((found, solved))
                if sum(weight.codes.numel() for _, weight in fresh) > LOT_WEIGHTS:
                    self._install_all(fresh)
                    fresh.clear()
            written = module_report(found, group.statistics, group.noted(report))
            notes |= self._write(found, solved, replace(written, tokens=group.tokens))
        self._install_all(fresh)
        return notes

    def _write(self, planned: PlannedModule, solved: QuantizedWeight, report: ModuleReport) -> dict[str, Any]:
        """Puts the tensors of a module into the next lot to be written, on the first rank; returns the note
        that goes with them."""
        if not self._ranks.first:
            return {module_note(planned): asdict(report)}
        for suffix, tensor in self._plan.layout.pack(solved, planned.spec.scheme).items():
            self._lot[f"{planned.stored}.{suffix}"] = tensor
        if sum(tensor.nbytes for tensor in self._lot.values()) > _LOT_BYTES:
            self._commit({})
        return {module_note(planned): asdict(report)}

    def _commit(self, notes: Mapping[str, Any]) -> None:
        self._behind.write(self._lot, notes)
        self._lot = {}

    def _quantize_head(self, head: PlannedModule, states: HiddenStates | None) -> None:
        """Quantises the output head on what follows the blocks makes of their output: the final norm's."""
        gathered = None if states is None else self._head_statistics(head, states)
        if gathered is not None:
            add_up({head.projection.name: gathered}, {head.projection.name: (0,)}, self._ranks)
        if not self._ranks.first:
            return
        projection = head.projection
        shape = (projection.out_features, projection.in_features)
        stored = self._instance.read(projection.parameter, shape[::-1] if projection.transposed else shape)
        solved, report = solve_head(
            head, projection.view(stored), gathered, self._plan.method, device=self._instance.device
        )
        self._commit(self._write(head, solved, module_report(head, gathered, report)))

    def _head_statistics(self, head: PlannedModule, states: HiddenStates) -> Statistics:
        statistics = self._gathering.empty(head)
        masks = iter(self._gathering.masks)
        self._replay.after_blocks(
            ((batch.ids, states.load(number)) for number, batch in enumerate(self._batches)),
            head.projection,
            lambda name, x: statistics.add(x, next(masks)),
        )
        return statistics

    def _solve_groups(self, groups: Sequence[ExpertGroup]) -> list[list[tuple[QuantizedWeight, SolveReport]]]:
        """Solves groups of experts, those of equal shapes and settings together."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, group in enumerate(groups):
            shapes = tuple(
                (each.projection.out_features, each.projection.in_features) for each in group.members
            )
            first = group.members[0]
            alike.setdefault((shapes, first.spec.scheme, first.options), []).append(number)
        results: dict[int, list[tuple[QuantizedWeight, SolveReport]]] = {}
        for numbers in alike.values():
            first = groups[numbers[0]].members[0]
            solved = self._plan.method.solve_many(
                [self._inputs(groups[number]) for number in numbers], first.spec.scheme, first.options
            )
            results |= dict(zip(numbers, solved, strict=True))
        if self._plan.method.calibrated:
            stop_if_far_off(
                (each.projection.name, self._instance.weight(each.projection), quantized)
                for number, group in enumerate(groups)
                for each, (quantized, _) in zip(group.members, results[number], strict=True)
            )
        return [results[number] for number in range(len(groups))]

    def _inputs(self, group: ExpertGroup) -> Inputs[Any]:
        # Widened where they are solved: those of all experts in float32 would be twice the block.
        weights = [self._instance.weight(each.projection) for each in group.members]
        return Inputs(weights, group.statistics, [each.projection.name for each in group.members])

    def _solve(
        self,
        members: Sequence[PlannedModule],
        statistics: Statistics | None,
        rows: Sequence[slice],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        """Solves some output channels of each module."""
        solved: list[tuple[QuantizedWeight, SolveReport]] = self._plan.method.solve(
            [
                self._instance.weight(planned.projection)[part].to(torch.float32)
                for planned, part in zip(members, rows, strict=True)
            ],
            statistics,
            members[0].spec.scheme,
            members[0].options,
            names=[planned.projection.name for planned in members],
        )
        if self._plan.method.calibrated:
            stop_if_far_off(
                (planned.projection.name, self._instance.weight(planned.projection)[part], quantized)
                for planned, part, (quantized, _) in zip(members, rows, solved, strict=True)
            )
        return solved


def _of_equal_settings(members: Sequence[PlannedModule]) -> list[list[PlannedModule]]:
    batches: dict[tuple[object, ...], list[PlannedModule]] = {}
    for planned in members:
        batches.setdefault((planned.spec.scheme, planned.options), []).append(planned)
    return list(batches.values())


def _check_weights(name: str, block: nn.Module) -> None:
    parameters = dict(block.named_parameters())
    # All are looked at before the first answer is waited for.
    finite = [torch.isfinite(parameter).all() for parameter in parameters.values()]
    for (inner, parameter), is_finite in zip(parameters.items(), finite, strict=True):
        if not bool(is_finite):
            bad = int((~torch.isfinite(parameter)).sum())
            raise NumericsError(
                f"{name}.{inner}: {bad} of {parameter.numel()} weights are NaN or infinite; "
                "check the source checkpoint"
            )
